"""Text given as public that is the clients' own, under whatever name: refused, or its shared lines counted."""

import collections
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.trainers.keyboard import toy
from trainers.common.errors import InputError
from trainers.common.packed import PackedTokens
from trainers.keyboard import corpus, overlap, pretrain, session, train

WORDS = ("we", "see", "tea", "they", "like", "rain", "bread", "music", "zqx", "you")


def lines(seed: int, count: int, least: int = 1, most: int = 9, words: int = 4) -> list[list[str]]:
    draw = np.random.default_rng(seed)
    return [[str(w) for w in draw.choice(WORDS[:words], draw.integers(least, most))] for _ in range(count)]


def runs_of(text):
    """The slow, obvious twin."""
    n = overlap.RUN
    return {tuple(line[i : i + n]) for line in text for i in range(len(line) - n + 1)}


def test_shared_runs_are_those_of_a_set_of_texts(monkeypatch):
    """Whatever the order of lines, the numbering of words and the size of a part; the order of words counts."""
    one, two = lines(0, 300), lines(1, 200)
    twins = [runs_of(text) for text in (one, two)]
    assert 50 < len(twins[0] & twins[1]) < len(twins[1])
    found = [overlap.words_of(PackedTokens.from_lists(text)) for text in (one, two)]
    assert [len(words.runs) for words in found] == [len(twin) for twin in twins]
    assert len(np.intersect1d(found[0].runs, found[1].runs)) == len(twins[0] & twins[1])
    few = [[tuple(line) for line in text if len(line) < overlap.RUN] for text in (one, two)]
    assert [len(words.short) for words in found] == [len(text) for text in few]
    both = sum((collections.Counter(few[0]) & collections.Counter(few[1])).values())
    assert 50 < overlap._in_common(found[0].short, found[1].short) == both
    monkeypatch.setattr(overlap, "_AT_ONCE", 100)
    halves = [PackedTokens.from_lists(part) for part in (one[:110], one[110:])]
    for again in (overlap.words_of(PackedTokens.from_lists(one[::-1])), overlap.words_of(*halves)):
        np.testing.assert_array_equal(again.runs, found[0].runs)
        np.testing.assert_array_equal(again.short, found[0].short)
    little = overlap.words_of(PackedTokens.from_lists([[], ["hi"], ["thank", "you", "so", "much"]]))
    assert [len(part) for part in little] == [0, 2, 1]
    assert [len(part) for part in overlap.words_of()] == [0, 0, 0]
    flat = PackedTokens.from_lists([[word for line in one for word in line]])
    np.testing.assert_array_equal(
        overlap.words_of(PackedTokens.from_lists(one)).across, overlap.words_of(flat).runs
    )


def test_a_sketch_tells_what_its_text_shares(monkeypatch):
    draw = np.random.default_rng(5)
    text = [[f"w{w}" for w in draw.integers(0, 500, 12)] for _ in range(900)]
    own = overlap.words_of(PackedTokens.from_lists(text[:600]))
    monkeypatch.setattr(overlap, "_SKETCH", 400)
    for begin, share in ((0, 1.0), (300, 0.5), (600, 0.0), (200, 2 / 3)):
        known = overlap.sketch(overlap.words_of(PackedTokens.from_lists(text[begin : begin + 600])))
        assert len(known) == 400
        sampled = own.runs[own.runs <= known[-1]]
        found = len(np.intersect1d(known, sampled)) / min(len(known), len(sampled))
        assert abs(found - share) < 0.08
        if share > 0.55:
            with pytest.raises(InputError, match="that m was made of are in the clients' text too"):
                overlap.require_public_model("m", known, own, "or none")
        elif share < 0.45:
            assert overlap.require_public_model("m", known, own, "or none") == []
    assert "cannot be told" in overlap.require_public_model("m", None, own, "or none")[0]


@pytest.fixture
def made(tmp_path):
    """Settings whose clients write long lines, and those lines."""
    own = [" ".join(line) for line in lines(2, 64, 6, 12, 10)]
    rows = [{"client_id": f"c{i}", "text": own[2 * i : 2 * i + 2]} for i in range(32)]
    for i, row in enumerate(rows):
        row["split"] = "train" if i < 24 else "test"
    (tmp_path / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return toy.config(tmp_path), own


def write(folder, texts) -> str:
    (folder / "public.txt").write_text("".join(f"{text}\n" for text in texts))
    return str(folder / "public.txt")


@pytest.mark.parametrize("option", ["public", "pretrain_data"])
@pytest.mark.parametrize(
    "kind",
    [
        "a copy",
        "the lines alone",
        "most of them",
        "among many others",
        "cut anew",
        "cut into threes",
        "with a mark behind each",
    ],
)
def test_the_clients_own_text_is_refused_under_another_name(tmp_path, made, option, kind):
    config, own = made
    others = [" ".join(line) for line in lines(3, 300, 6, 12, 10)]
    if kind == "a copy":
        source = str(shutil.copy(config.data, tmp_path / "copy.jsonl"))
    else:
        all_words = " ".join(own).split()
        texts = {
            "the lines alone": own,
            "most of them": own[:20] + others[:5],
            "among many others": own + others,
            "cut anew": [" ".join(own[i : i + 8]) for i in range(0, len(own), 8)],
            "with a mark behind each": [f"{line} ." for line in own],
            "cut into threes": [" ".join(all_words[i : i + 3]) for i in range(0, len(all_words), 3)],
        }
        source = write(tmp_path, texts[kind])
    with pytest.raises(InputError, match=f"--{option.replace('_', '-')}.*clients' own data"):
        session.train(dataclasses.replace(config, **{option: source}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["examples beyond the cap", "words beyond the cap"])
def test_what_the_run_leaves_out_is_the_clients_too(tmp_path, made, kind, monkeypatch):
    config, own = made
    if kind.startswith("examples"):
        rest = own[1::2]  # the second of each client
        config = dataclasses.replace(config, max_examples=1)
    else:
        words = [f"w{n}" for n in range(3000)]
        row = {"client_id": "c0", "text": [" ".join(words)], "split": "train"}
        with open(config.data, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        rest = [" ".join(words[at : at + 9]) for at in range(2500, 3000, 9)]
    with pytest.raises(InputError, match=r"--public.*clients' own data"):
        corpus.load(dataclasses.replace(config, public=write(tmp_path, rest)))


def test_a_copy_of_short_lines_is_refused_too_and_like_ones_are_not(tmp_path):
    config = toy.config(tmp_path)
    copy = str(shutil.copy(config.data, tmp_path / "copy.jsonl"))
    with pytest.raises(InputError, match="clients' own data"):
        corpus.load(dataclasses.replace(config, public=copy))
    rows = [json.loads(line)["text"] for line in Path(config.data).read_text().splitlines()]
    backwards = write(tmp_path, [text for row in rows for text in row][::-1])
    with pytest.raises(InputError, match=r"lines of fewer than 5 words .* clients' own data"):
        corpus.load(dataclasses.replace(config, public=backwards))
    said = [" ".join((s, v, o)) for s in toy.SUBJECTS for v in toy.VERBS for o in toy.OBJECTS]
    (told,) = corpus.load(dataclasses.replace(config, public=write(tmp_path, said))).shared
    assert "cannot be told" in told


def test_a_model_of_the_clients_own_text_is_no_start(tmp_path, made):
    """Pretrained where other clients were, whose text it is not."""
    config, own = made
    (tmp_path / "elsewhere").mkdir()
    elsewhere = toy.config(
        tmp_path / "elsewhere",
        pretrain_data=write(tmp_path, own),
        pretrain_epochs=1.0,
        rounds=1,
        checkpoint_every=1,
    )
    session.train(elsewhere)
    config = dataclasses.replace(config, initial_model=elsewhere.run_dir)
    with pytest.raises(InputError, match=r"--initial-model .* was made of are in the clients' text too"):
        session.train(config)
    assert not (tmp_path / "run").exists()


def test_a_few_shared_lines_are_told_to_the_operator_and_not_in_the_statement(tmp_path, made, capsys):
    """Their number depends on clients' text without noise."""
    config, own = made
    source = write(tmp_path, ["hi", *own[:3], *(" ".join(line) for line in lines(4, 100, 6, 12, 10))])
    config = dataclasses.replace(
        config, pretrain_data=source, pretrain_epochs=1.0, rounds=1, evaluate_every=1, checkpoint_every=1
    )
    session.train(config)
    err = capsys.readouterr().err
    said = f"different runs of 5 words in --pretrain-data {source} are in the clients' text too, which has"
    assert said in err
    folder = tmp_path / "run"
    manifest = folder / "manifest.json"
    assert said in json.loads(manifest.read_text())["shared_lines"][0]
    assert manifest.stat().st_mode & 0o077 == 0
    for name in ("privacy.json", "privacy.md", "mechanism.json"):
        text = (folder / name).read_text()
        assert "1 epoch)" in text
        assert "given as public" in text
        assert "which has" not in text
    data = corpus.load(config)
    again = train.Run(
        config, data, folder, pretrain.prepare(config, data, train.model_sizes(config, data.vocabulary))
    )
    assert again.resume()[0] == 1  # the same note
