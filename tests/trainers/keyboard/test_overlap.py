"""Text given as public that is the clients' own, under whatever name: refused, or its shared lines counted."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from tests.trainers.keyboard import toy
from trainers.common.errors import InputError
from trainers.common.packed import PackedTokens
from trainers.keyboard import corpus, overlap, pretrain, session, train

WORDS = ("we", "see", "tea", "they", "like", "rain", "bread", "music", "zqx", "you")


def lines(seed: int, count: int, least: int = 1, most: int = 9) -> list[list[str]]:
    draw = np.random.default_rng(seed)
    return [[str(w) for w in draw.choice(WORDS[:4], draw.integers(least, most))] for _ in range(count)]


def test_shared_lines_are_those_of_a_set_of_texts(monkeypatch):
    """Whatever the order of lines, the numbering of words and the size of a part; a line's order of words counts."""
    one, two = lines(0, 4000), lines(1, 3000)
    long = [{tuple(x) for x in text if len(x) >= overlap.LEAST_WORDS} for text in (one, two)]
    assert 100 < len(long[0] & long[1]) < len(long[1])
    hashes = [overlap.lines_of(PackedTokens.from_lists(text)) for text in (one, two)]
    assert [len(h) for h in hashes] == [len(s) for s in long]
    assert len(np.intersect1d(*hashes)) == len(long[0] & long[1])
    monkeypatch.setattr(overlap, "_AT_ONCE", 100)
    np.testing.assert_array_equal(overlap.lines_of(PackedTokens.from_lists(one[::-1])), hashes[0])
    halves = [PackedTokens.from_lists(part) for part in (one[:1500], one[1500:])]
    np.testing.assert_array_equal(overlap.lines_of(*halves), hashes[0])
    assert not len(overlap.lines_of(PackedTokens.from_lists([[], ["hi"], ["thank", "you", "so", "much"]])))
    assert not len(overlap.lines_of())


@pytest.fixture
def made(tmp_path):
    """Settings whose clients write long lines, and those lines."""
    own = [" ".join(line) for line in lines(2, 64, 6, 12)]
    rows = [{"client_id": f"c{i}", "text": own[2 * i : 2 * i + 2]} for i in range(32)]
    for i, row in enumerate(rows):
        row["split"] = "train" if i < 24 else "test"
    (tmp_path / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return toy.config(tmp_path), own


def write(folder, texts) -> str:
    (folder / "public.txt").write_text("".join(f"{text}\n" for text in texts))
    return str(folder / "public.txt")


@pytest.mark.parametrize("option", ["public", "pretrain_data"])
@pytest.mark.parametrize("kind", ["a copy", "the lines alone", "most of them", "among many others"])
def test_the_clients_own_text_is_refused_under_another_name(tmp_path, made, option, kind):
    config, own = made
    others = [" ".join(line) for line in lines(3, 300, 6, 12)]
    if kind == "a copy":
        source = str(shutil.copy(config.data, tmp_path / "copy.jsonl"))
    else:
        texts = {
            "the lines alone": own,
            "most of them": own[:20] + others[:5],
            "among many others": own + others,
        }
        source = write(tmp_path, texts[kind])
    with pytest.raises(InputError, match=f"--{option.replace('_', '-')}.*clients' own data"):
        session.train(dataclasses.replace(config, **{option: source}))
    assert not (tmp_path / "run").exists()


def test_a_copy_of_short_lines_is_refused_too_and_like_ones_are_not(tmp_path):
    config = toy.config(tmp_path)
    copy = str(shutil.copy(config.data, tmp_path / "copy.jsonl"))
    with pytest.raises(InputError, match="clients' own data"):
        corpus.load(dataclasses.replace(config, public=copy))
    said = [" ".join((s, v, o)) for s in toy.SUBJECTS for v in toy.VERBS for o in toy.OBJECTS]
    assert corpus.load(dataclasses.replace(config, public=write(tmp_path, said))).shared == []


def test_a_few_shared_lines_are_told_to_the_operator_and_not_in_the_statement(tmp_path, made, capsys):
    """Their number depends on clients' text without noise."""
    config, own = made
    source = write(tmp_path, ["hi", *own[:3], *(" ".join(line) for line in lines(4, 100, 6, 12))])
    config = dataclasses.replace(
        config, pretrain_data=source, pretrain_epochs=1.0, rounds=1, evaluate_every=1, checkpoint_every=1
    )
    session.train(config)
    said = (
        f"3 of 103 different lines of --pretrain-data {source} are clients' lines too, of which there are 64"
    )
    assert said in capsys.readouterr().err
    folder = tmp_path / "run"
    manifest = folder / "manifest.json"
    assert said in json.loads(manifest.read_text())["shared_lines"][0]
    assert manifest.stat().st_mode & 0o077 == 0
    for name in ("privacy.json", "privacy.md", "mechanism.json"):
        text = (folder / name).read_text()
        assert "1 epoch)" in text
        assert "given as public" in text
        assert "of which there are" not in text
    data = corpus.load(config)
    again = train.Run(
        config, data, folder, pretrain.prepare(config, data, train.model_sizes(config, data.vocabulary))
    )
    assert again.resume()[0] == 1  # the same note
