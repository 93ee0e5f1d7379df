"""Suggestions, completion, rescoring and export: equal to slow, obvious twins; and the commands around them."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.trainers.keyboard import toy
from trainers.common import metrics as logged
from trainers.common.errors import InputError
from trainers.common.vocabulary import Vocabulary
from trainers.keyboard import cli, compose, corpus, features, model, released, rescore, session, terminal
from trainers.keyboard.released import Released
from trainers.keyboard.suggest import Suggester

WORDS = ("the", "them", "then", "tea", "we", "see", "sea", "bread", "it's", "?")


@pytest.fixture(scope="module")
def little() -> Released:
    """A random model whose outputs are far from uniform."""
    vocabulary = Vocabulary(WORDS, "public")
    sizes = model.ModelConfig(num_tokens=vocabulary.size, embedding_size=6, hidden_size=9)
    params = jax.tree.map(lambda x: 6 * x, model.init_params(sizes, seed=3))
    return Released(params, sizes, vocabulary, {"sentence": "s"}, 7)


_logits = jax.jit(lambda params, inputs: model.logits(params, inputs, cell="cifg"))
_known = {}


def log_probs(little, words):
    """By the whole text at once (padded to one shape, which a causal model does not see)."""
    words = tuple(words)
    if words not in _known:
        v = little.vocabulary
        inputs = np.zeros((12, 1), np.int32)
        inputs[: len(words) + 1, 0] = [v.bos, *map(v.id, words)]
        _known[words] = np.asarray(jax.nn.log_softmax(_logits(little.params, inputs)[len(words), 0]))
    return _known[words]


@pytest.fixture(scope="module")
def examples(little):
    rng = np.random.default_rng(0)
    texts = [[WORDS[i] for i in rng.integers(0, len(WORDS), rng.integers(1, 6))] for _ in range(20)]
    return little.vocabulary.encode([*texts, ["zebra", "the"]], 5)


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


def completion(little, words, threshold, min_words):
    """Word by word: (words shown) after `words`."""
    v, shown, confidence = little.vocabulary, [], 1.0
    for _ in range(compose.LENGTH):
        scores = log_probs(little, [*words, *shown])
        offered = [*range(1, len(WORDS) + 1), v.eos]
        best = max(offered, key=lambda token: scores[token])
        confidence *= np.exp(scores[best])
        if best == v.eos or confidence < threshold:
            break
        shown.append(WORDS[best - 1])
    return shown if len(shown) >= min_words else []


@pytest.mark.parametrize(("threshold", "min_words"), [(0.01, 1), (0.05, 2), (0.3, 1)])
def test_a_completion_is_the_greedy_one_above_the_threshold(little, threshold, min_words):
    suggester, lengths = Suggester(little), set()
    for text in ("", "we ", "the tea ", "sea sea sea ", "bread ? "):
        suggester.read(text)
        got = compose.complete(little, suggester, threshold=threshold, min_words=min_words)
        assert got == completion(little, text.split(), threshold, min_words)
        lengths.add(len(got))
    assert len(lengths) > 1


def test_trigger_rate_and_accuracy_are_counted_position_by_position(little, examples):
    thresholds = np.array([0.02, 0.1, 0.3])
    points = compose.measure(little.params, examples, little.sizes, thresholds=thresholds, min_words=2)
    v = little.vocabulary
    for point in points:
        positions = shown = right = accepted = 0
        for row in examples:
            tokens = row[row != 0]
            for t in range(1, len(tokens)):
                positions += 1
                words = completion(little, v.decode(tokens[1:t]), point.threshold, 2)
                shown += bool(words)
                if words and words == v.decode(tokens[t : t + len(words)]):
                    right += 1
                    accepted += len(words)
        assert point.trigger_rate == pytest.approx(100 * shown / positions)
        assert point.words == pytest.approx(100 * accepted / positions)
        assert np.isnan(point.accuracy) if not shown else point.accuracy == pytest.approx(100 * right / shown)
    assert points[0].trigger_rate > points[-1].trigger_rate


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


@pytest.mark.parametrize("letters", ["t", "se", "xq"])
@pytest.mark.parametrize("threshold", [0.5, 0.05, 1e-5])
def test_a_completion_of_the_word_being_typed_equals_the_greedy_one(little, letters, threshold):
    suggester = Suggester(little)
    suggester.read("we " + letters)
    found = compose.complete(little, suggester, threshold=threshold, letters=letters)
    expected, product = [], 1.0
    begin = [w for w in WORDS if w.startswith(letters)]
    for place in range(compose.LENGTH if begin else 0):
        p = np.exp(np.float64(log_probs(little, ["we", *expected])))
        of = {w: p[little.vocabulary.id(w)] for w in (begin if place == 0 else WORDS)}
        if place == 0:
            of = {w: q / sum(of.values()) for w, q in of.items()}
        elif p[little.vocabulary.eos] > max(of.values()):
            break
        best = max(of, key=of.__getitem__)
        product *= of[best]
        if product < threshold:
            break
        expected.append(best)
    assert found == (expected if len(expected) >= compose.MIN_WORDS else [])


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

    class Piped:
        isatty = staticmethod(lambda: False)
        __iter__ = lambda self: iter(["we s\n", "\n"])

    monkeypatch.setattr(sys, "stdin", Piped())
    _, shown = command(capsys, "suggest", "--run-dir", out)
    assert shown.splitlines()[0] == "see"
    _, shown = command(capsys, "compose", "--run-dir", out, "--text", "we", "--threshold", "1e-6", "--json")
    assert "completions" in json.loads(shown.splitlines()[-1])
    _, shown = command(capsys, "rescore", "--run-dir", out, "--text", "we ser tea", "--json")
    assert json.loads(shown.splitlines()[-1])["rescored"][0]["rescored"] == ["we", "see", "tea"]
    with pytest.raises(InputError, match="no clients"):
        cli.main(["compose", "--run-dir", str(out)])


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
        (["rescore", "--tap-stddev", "0", "--text", "a"], "--tap-stddev"),
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
