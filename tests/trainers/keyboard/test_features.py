"""Suggestions, completion, rescoring and export: equal to slow, obvious twins; and the commands around them."""

import json
import os
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.trainers.keyboard import toy
from tests.trainers.keyboard.little import WORDS, log_probs
from trainers.common import metrics as logged
from trainers.common.errors import InputError
from trainers.keyboard import (
    cli,
    compose,
    corpus,
    features,
    released,
    rescore,
    session,
    terminal,
)
from trainers.keyboard.suggest import Suggester


def test_the_cached_state_equals_the_whole_text(little):
    suggester = Suggester(little)
    for text in ("we see ", "we see the", "we see the them zebra ", "we ", "", "sea "):
        letters = suggester.read(text)
        words = text.split() if not letters else text.split()[:-1]
        assert np.allclose(suggester.log_probs, log_probs(little, words), atol=1e-5)


def test_suggestions_are_the_most_probable_words_with_these_letters(little):
    suggester = Suggester(little)
    for text in ("", "we see ", "tea t", "tea the", "tea s", "it'"):
        letters = suggester.read(text)
        possible = [w for w in WORDS if w.startswith(letters)]
        expected = sorted(possible, key=lambda w: -suggester.log_probs[little.vocabulary.id(w)])[:3]
        assert suggester.suggest(letters) == expected
    assert suggester.suggest("q") == []
    assert len(suggester.suggest(count=50)) == len(WORDS)


def test_tap_scores_are_the_gaussian_density(little):
    words = rescore.tappable(WORDS)
    assert sorted(words.token[3]) == sorted(little.vocabulary.id(w) for w in ("the", "tea", "see", "sea"))
    assert not any(little.vocabulary.id(w) in ids for w in ("it's", "?") for ids in words.token.values())
    taps = np.random.default_rng(0).normal(2, 2, (5, 3, 2))
    scores = rescore.spatial_scores(taps, words.centre[3], 0.7)
    for i, tap in enumerate(taps):
        for j, token in enumerate(words.token[3]):
            centre = np.array([rescore.KEYS[c] for c in WORDS[token - 1]])
            assert scores[i, j] == pytest.approx(-((tap - centre) ** 2).sum() / (2 * 0.7**2))


def test_rescoring_repairs_what_taps_alone_get_wrong(little, examples):
    words = rescore.tappable(WORDS)
    cases = rescore.cases(little.params, examples, little.sizes, words, most=10_000)
    tappable = {little.vocabulary.id(w) for w in WORDS if w.isalpha()}
    assert len(cases.target) == sum(int(t) in tappable for row in examples for t in row[1:])
    found = [(row, t) for t in range(1, 6) for row in examples if int(row[t]) in tappable]
    for (row, t), target, scores in zip(found, cases.target, cases.log_probs, strict=True):
        assert row[t] == target
        assert np.allclose(scores, log_probs(little, little.vocabulary.decode(row[1:t])), atol=1e-4)
    flat = np.zeros_like(cases.log_probs)
    ratio = lambda prior, stddev: rescore.word_modified_ratio(
        cases, words, prior=prior, stddev=stddev, seed=0
    )
    assert ratio(flat, 1e-3) == 0
    knowing = flat.copy()
    knowing[np.arange(len(flat)), cases.target] = 1e9
    assert ratio(flat, 1.5) > 20 > ratio(knowing, 1.5) == 0
    alone = [length for length, ids in words.token.items() if len(ids) == 1]
    spared = np.mean([len(WORDS[t - 1]) in alone for t in cases.target])
    assert ratio(-knowing, 1e-3) == pytest.approx(100 * (1 - spared))
    measured = rescore.measure(cases, cases, words, stddev=1.0, seed=0)
    assert measured.taps == ratio(flat, 1.0)
    assert measured.weight in rescore.WEIGHTS


def test_keystrokes_are_those_of_a_user_who_follows_the_suggestions(little, examples):
    words = rescore.tappable(WORDS)
    cases = rescore.cases(little.params, examples[:10], little.sizes, words, most=30)
    suggester = Suggester(little)
    keystrokes, plain, picked = [], [], []
    for target, scores in zip(cases.target, cases.log_probs, strict=True):
        word = WORDS[target - 1]
        suggester._after[-1] = (suggester.state, scores)
        offered = [n for n in range(len(word)) if word in suggester.suggest(word[:n])]
        keystrokes.append(offered[0] + 1 if offered else len(word) + 1)
        picked.append(offered[:1] == [0])
        plain.append(len(word) + 1)
    speed = rescore.speed(cases, WORDS)
    assert speed.keystrokes == pytest.approx(np.mean(keystrokes))
    assert speed.keystrokes_plain == pytest.approx(np.mean(plain))
    assert speed.picked_rate == pytest.approx(100 * np.mean(picked))
    assert speed.words_per_minute == pytest.approx(36.2 * np.sum(plain) / np.sum(keystrokes))


def test_candidates_of_typed_letters(little):
    words, flat = rescore.tappable(WORDS), np.zeros(little.sizes.num_tokens)
    found = rescore.candidates("sra", words, WORDS, flat, stddev=0.5, weight=1.0)
    assert [w for w, _ in found][:2] == ["sea", "see"]
    flat[little.vocabulary.id("see")] = 100.0
    assert rescore.candidates("sra", words, WORDS, flat, stddev=0.5, weight=1.0)[0][0] == "see"
    assert rescore.candidates("it's", words, WORDS, flat, stddev=0.5, weight=1.0) == [("it's", 0.0)]


@pytest.mark.parametrize(
    ("text", "key", "after"),
    [
        ("we s", "e", "we se"),
        ("we s", "\t", "we see "),
        ("we s", "2", "we sea "),
        ("we s", "3", "we s3"),
        ("we ", "1", "we see "),
        ("we ", "\x1b[C", "we the tea "),
        ("we th", "\x1b[C", "we the tea "),
        ("we (s", "\t", "we (see "),
        ("we", "\x7f", "w"),
        ("", "\x7f", ""),
        ("we", "\r", ""),
        ("we", "\x1b[A", "we"),
        ("we", "\x04", None),
    ],
)
def test_keys_of_the_terminal(text, key, after):
    assert terminal.edit(text, key, ["see", "sea"], ["the", "tea"]) == after


def test_one_more_word_costs_one_step_and_taking_back_costs_none(little):
    suggester = Suggester(little)
    steps = []
    for text in (
        "",
        "we",
        "we ",
        "we s",
        "we see ",
        "we se",
        "we ",
        "we sea ",
        "we sea it'",
        "we sea it's ?",
    ):
        suggester.read(text)
        steps.append(suggester.steps)
    assert steps == [1, 1, 2, 2, 3, 3, 3, 4, 4, 6]
    assert np.allclose(suggester.log_probs, log_probs(little, ["we", "sea", "it's", "?"]), atol=1e-5)


@pytest.mark.parametrize(
    ("text", "letters", "words"),
    [("It'", "it'", []), ("we?s", "s", ["we", "?"]), ("(the", "the", ["("]), ("the.", "", ["the", "."])],
)
def test_signs_end_a_word_and_an_apostrophe_may_go_on(little, text, letters, words):
    suggester = Suggester(little)
    assert suggester.read(text) == letters
    assert np.allclose(suggester.log_probs, log_probs(little, words), atol=1e-5)


def test_letters_that_begin_no_word_are_taken_as_noisy_typing(little):
    suggester = Suggester(little)
    words = rescore.tappable(WORDS)
    letters = suggester.read("we ser")
    assert (
        features._offered(letters, suggester, words, 3)[:2]
        == [
            w for w, _ in rescore.candidates("ser", words, WORDS, suggester.log_probs, stddev=0.5, weight=1.0)
        ][:2]
    )
    assert features._offered("se", suggester, words, 3) == suggester.suggest("se")
    assert features._offered("zzzzzzzzzzz", suggester, words, 3) == []


def test_a_model_file_gives_back_the_model_and_its_statement(little, tmp_path):
    path = tmp_path / "m.safetensors"
    released.save(path, little)
    back = released.load(path)
    assert all(np.array_equal(back.params[name], value) for name, value in little.params.items())
    assert (back.sizes, back.vocabulary.words, back.statement, back.rounds) == (
        little.sizes,
        WORDS,
        {"sentence": "s"},
        7,
    )


def test_damaged_model_files_end_in_one_line(little, tmp_path):
    path = tmp_path / "m.safetensors"
    released.save(path, little)
    whole = path.read_bytes()
    arrays = load_file(path)
    plain = lambda changed: save_file(changed, path)
    broken = {
        "not a whole safetensors": lambda: path.write_bytes(whole[:-10]),
        "not a keyboard model": lambda: plain(arrays),
        "is damaged": lambda: path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]),
        "does not exist": path.unlink,
        "do not fit": lambda: released.save(
            path, little._replace(params={**little.params, "bias": little.params["bias"][:-1]})
        ),
        "no finite": lambda: released.save(
            path, little._replace(params={**little.params, "bias": little.params["bias"] + jnp.nan})
        ),
    }
    for says, do in broken.items():
        do()
        with pytest.raises(InputError, match=says) as caught:
            released.load(path)
        assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = toy.config(tmp_path_factory.mktemp("features"), rounds=2)
    session.train(config)
    return config


def command(capsys, *argv):
    capsys.readouterr()
    code = cli.main([str(a) for a in argv])
    return code, capsys.readouterr().out


def piped(monkeypatch, text):
    """Makes `text` what is piped in."""
    read, write = os.pipe()
    os.write(write, text.encode())
    os.close(write)
    monkeypatch.setattr(sys, "stdin", os.fdopen(read, encoding="utf-8"))


def test_lines_piped_in_are_answered_one_by_one(little, run, tmp_path, capsys, monkeypatch):
    released.save(tmp_path / "little.safetensors", little)
    where = ("--run-dir", tmp_path / "little.safetensors")
    lines, suggester, expected = ("the tea ", "sea see", "we ", "bread ? "), Suggester(little), []
    for line in lines:
        suggester.read(line.strip() + " ")
        expected.append(compose.complete(little, suggester, threshold=0.01) or None)
    assert None in expected
    assert len(expected) > expected.count(None) + 1
    piped(monkeypatch, "\n".join(lines) + "\n")
    _, shown = command(capsys, "compose", *where, "--threshold", "0.01", "--json")
    rows = json.loads(shown.splitlines()[-1])["completions"]
    assert rows == [{"text": t, "completion": c} for t, c in zip(lines, expected, strict=True)]
    piped(monkeypatch, "\n".join(lines))
    _, shown = command(capsys, "compose", *where, "--threshold", "0.01")
    for line, text, words in zip(shown.splitlines(), lines, expected, strict=True):
        assert line == (f"{text} [{' '.join(words)}]" if words else line)
        assert line.startswith(text)
        assert ("nothing was shown" in line) == (words is None)

    where = ("--run-dir", run.run_dir)
    piped(monkeypatch, "we ser tea\nsra\n")
    _, shown = command(capsys, "rescore", *where)
    assert shown.splitlines()[0] == "we ser tea -> we see tea"
    assert len(shown.splitlines()) == 2

    piped(monkeypatch, "")  # nothing comes: measured, as with </dev/null
    assert command(capsys, "compose", *where)[1].startswith("threshold")


def test_where_no_completion_is_shown_it_says_so(run, capsys):
    where = ("--run-dir", run.run_dir, "--threshold", "1")
    _, shown = command(capsys, "compose", *where, "--text", "we ", "they ")
    assert shown.count("(nothing was shown: no completion above the threshold 1)") == 2
    assert "[]" not in shown
    for name, texts in (("compose", "completions"), ("suggest", "suggestions")):
        _, shown = command(capsys, name, *where, "--text", "we ", "--json")
        assert json.loads(shown.splitlines()[-1])[texts][0]["completion"] is None
    _, shown = command(capsys, "compose", *where)
    assert "nan" not in shown
    assert shown.splitlines()[-2].endswith("nothing was shown")
    _, shown = command(capsys, "compose", *where, "--json")
    result = json.loads(shown.splitlines()[-1])
    assert (result["trigger_rate"], result["accuracy"]) == (0, None)


def test_export_and_the_commands_that_use_it(run, tmp_path, capsys, monkeypatch):
    out = tmp_path / "k.safetensors"
    assert command(capsys, "export", "--run-dir", run.run_dir, "--output", out)[0] == 0
    statement = json.loads((tmp_path / "k.safetensors.privacy.json").read_text())
    assert released.load(out).statement == statement
    assert statement["sentence"].split(".")[0] in (tmp_path / "k.safetensors.privacy.md").read_text()
    assert set(load_file(out)) == set(released.load(run.run_dir).params)
    with pytest.raises(InputError, match="exists already"):
        cli.main(["export", "--run-dir", run.run_dir, "--output", str(out)])
    with pytest.raises(InputError, match="must end in"):
        cli.main(["export", "--run-dir", run.run_dir, "--output", str(tmp_path / "k.bin")])

    _, shown = command(capsys, "suggest", "--run-dir", out, "--text", "we ", "we s", "--json")
    rows = json.loads(shown.splitlines()[-1])["suggestions"]
    assert [len(r["suggestions"]) for r in rows] == [3, 1]
    assert rows[1]["suggestions"] == ["see"]

    piped(monkeypatch, "we s\n\n")
    _, shown = command(capsys, "suggest", "--run-dir", out)
    assert shown.splitlines()[0] == "see"
    assert len(shown.splitlines()) == 2
    piped(monkeypatch, "")
    _, shown = command(capsys, "compose", "--run-dir", out, "--text", "we", "--threshold", "1e-6", "--json")
    assert "completions" in json.loads(shown.splitlines()[-1])
    _, shown = command(capsys, "rescore", "--run-dir", out, "--text", "we ser tea", "--json")
    assert json.loads(shown.splitlines()[-1])["rescored"][0]["rescored"] == ["we", "see", "tea"]
    for name in ("compose", "evaluate"):
        with pytest.raises(InputError, match=r"holds no clients.*--data"):
            cli.main([name, "--run-dir", str(out)])
    other = toy.write_clients(tmp_path / "other.jsonl", clients=40, seed=3)
    renamed = tmp_path / "renamed.jsonl"
    renamed.write_text(other.read_text().replace('"text"', '"said"').replace('"client_id"', '"who"'))
    fields = ("--data", renamed, "--client-field", "who", "--text-field", "said")
    scored = [
        json.loads(command(capsys, "evaluate", "--run-dir", where, *data, "--json")[1].splitlines()[-1])
        for where in (run.run_dir, out)
        for data in (("--data", other), fields)
    ]
    for result in scored:  # the same whether from the folder or the file, however the fields are called
        assert result.keys() == scored[0].keys()
        for name, value in scored[0].items():
            if name != "run_dir":  # threads add in their own order
                assert result[name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)
    assert scored[-1]["run_dir"] == str(out)


def test_completions_are_counted_by_round_beside_rho(run):
    rows = [r for r in logged.read(f"{run.run_dir}/metrics.jsonl") if "evaluation" in r]
    assert [r["round"] for r in rows] == [1]
    data = corpus.load(run)
    again = compose.measure(
        released.load(run.run_dir).params,
        data.validation[: run.evaluation_examples],
        released.load(run.run_dir).sizes,
        thresholds=np.array([compose.THRESHOLD]),
    )[0]
    assert rows[-1]["smart_compose"] == logged.plain(again._asdict())
    assert rows[-1]["covered_by_guarantee"] is False
    assert rows[-1]["rho"] > 0


def test_measuring_on_held_out_clients(run, tmp_path, capsys):
    picture = tmp_path / "c.png"
    _, shown = command(
        capsys, "compose", "--run-dir", run.run_dir, "--threshold", "0.002", "--output", picture, "--json"
    )
    result = json.loads(shown.splitlines()[-1])
    assert picture.stat().st_size > 1000
    assert any(p["threshold"] == 0.002 for p in result["curve"])
    assert result["rho"] == released.load(run.run_dir).statement["rho"]
    _, shown = command(
        capsys, "rescore", "--run-dir", run.run_dir, "--data", run.data, "--output", picture, "--json"
    )
    result = json.loads(shown.splitlines()[-1])
    assert 0 <= result["word_modified_ratio"]["taps_and_model"] <= 100
    assert result["speed"]["keystrokes"] <= result["speed"]["keystrokes_plain"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["suggest", "--threshold", "0", "--text", "a"], "--threshold"),
        (["suggest", "--offered", "0", "--text", "a"], "--offered"),
        (["compose", "--min-words", "9", "--text", "a"], "--min-words"),
        (["compose", "--examples", "0"], "--examples"),
        (["compose", "--beams", "0", "--text", "a"], "--beams"),
        (["suggest", "--beams", "65", "--text", "a"], "--beams"),
        (["rescore", "--tap-stddev", "0", "--text", "a"], "--tap-stddev"),
        (["rescore", "--tap-stddev", "1e-200", "--text", "a"], "--tap-stddev"),
        (["rescore", "--weight", "nan", "--text", "a"], "--weight"),
        (["rescore", "--weight", "inf", "--text", "a"], "--weight"),
        (["rescore", "--seed", "-1", "--text", "a"], "--seed"),
        (["export", "--run-dir", "/nowhere"], "not the folder of a run"),
        (["suggest", "--run-dir", "/nowhere", "--text", "a"], "does not exist"),
    ],
)
def test_refusals(run, argv, says):
    if "--run-dir" not in argv:
        argv = [*argv, "--run-dir", run.run_dir]
    with pytest.raises(InputError, match=says):
        cli.main(argv)
