"""`store`: which pairs count depends on each pair alone, nothing of the user's is lost, nothing half-made counts."""

import functools
import json
import os
import signal
import stat
import subprocess
import sys
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpriv import keys, pq
from tests.trainers.translation.test_cli import ENGLISH, ROOT, WORDS, run
from trainers.cli import main
from trainers.common import readers
from trainers.common.pairs import Pair
from trainers.translation import cells, data, datastore, release, store_command
from trainers.translation import model as models
from trainers.translation.config import ModelConfig


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """A folder with an untrained model and cells for it."""
    folder = tmp_path_factory.mktemp("public")
    texts = [f"{a} {b} {i} das fenster" for i, (a, b) in enumerate(zip(ENGLISH, WORDS))] * 3
    vocabulary = data.train_vocabulary(texts, 330)
    shape = ModelConfig(
        vocabulary_size=len(vocabulary), dim=16, ffn_dim=32, encoder_layers=1, decoder_layers=1
    )
    params = models.init(shape, keys.stream(keys.root(0), "translation-model"))[1]
    data.save(folder, data.make(shape, params, vocabulary))
    centroids = np.random.default_rng(0).standard_normal((1, 8, 16))
    datastore.save_codebook(folder / "cells.npz", pq.Codebook(jnp.asarray(centroids, jnp.float32)))
    return folder


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(pairs, **more):
    return [{"en": a, "de": b, **more} for a, b in pairs]


PRIVATE = ["--epsilon", "5", "--delta", "1e-4", "--max-buckets", "3", "--adjacency", "add-remove"]


def store(public, path, out):
    """The command that writes a noisy histogram of a file."""
    return [
        *("store", "--model", public, "--codebook", public / "cells.npz", "--data", path, "--out", out),
        *PRIVATE,
    ]


@pytest.fixture
def counts(public, tmp_path, monkeypatch, capsys):
    """A function that stores a file and returns the true counts, by bucket, that the noise would be added to."""
    seen = []
    real = release.release
    monkeypatch.setattr(data, "load", functools.cache(data.load))  # one model, compiled once
    monkeypatch.setattr(release, "calibrate", functools.cache(release.calibrate))
    monkeypatch.setattr(
        release, "release", lambda key, counted, config: seen.append(counted) or real(key, counted, config)
    )

    def of(path, *more):
        out = tmp_path / f"store-{len(seen)}"
        status, said = run(capsys, *store(public, path, out), *more)
        assert status == 0, said
        found = seen[-1]
        return Counter(
            dict(zip(zip(found.cells[:, 0].tolist(), found.values.tolist()), found.counts.tolist()))
        )

    return of


HUB = [(f"house {i} {ENGLISH[i % 12]}", "das fenster") for i in range(60)]
OTHERS = [(f"{ENGLISH[i % 12]} {i}", f"{WORDS[i % 12]} {i}") for i in range(20)]


@pytest.mark.parametrize("layout", ["one file", "train and test", "split column", "opt-out"])
def test_one_pair_more_moves_only_its_own_buckets_by_one(counts, tmp_path, layout):
    """60 pairs share a target: divided as a group, one pair could carry them all from one part into another."""
    base = HUB + OTHERS
    more: list = []
    # A source whose hash would put it into a test part, and one that would not.
    place = lambda word: readers.unit_hash(f"stone{word}river")
    held = next(n for n in "abcdefghijklmnopqrstuvwxyz" if 0.05 < place(n) < 0.15)
    for number, word in enumerate((held, "zz")):
        extra = (f"stone {word} river", "das fenster")
        both = (base, [extra, *base])
        got = []
        for which, pairs in enumerate(both):
            if layout == "split column":
                listed = rows(pairs, split="train") + rows(OTHERS[:3], split="test")
                path = write(tmp_path / f"{number}-{which}.jsonl", listed)
            elif layout == "train and test":
                path = write(tmp_path / f"{number}-{which}.train.jsonl", rows(pairs))
                write(tmp_path / f"{number}-{which}.test.jsonl", rows([*OTHERS[:3], HUB[0]]))
            else:
                path = write(tmp_path / f"{number}-{which}.jsonl", rows(pairs))
            if layout == "opt-out":
                (tmp_path / "no").write_text("\n".join(a for a, _ in HUB[:5]), encoding="utf-8")
                more = ["--opt-out", tmp_path / "no"]
            got.append(counts(path, *more))
        moved = {k: got[1][k] - got[0][k] for k in got[0] | got[1] if got[1][k] != got[0][k]}
        assert 1 <= len(moved) <= 3  # --max-buckets
        assert set(moved.values()) == {1}
    assert sum(got[0].values()) > 100


def test_a_pair_fills_the_same_buckets_in_any_company(public):
    model = data.load(public)
    book = datastore.load_codebook(public / "cells.npz")
    examples = model.vocabulary.examples([Pair(*p) for p in HUB + OTHERS])
    assert isinstance(book, pq.Codebook)
    together = cells.fill(model, book, examples)
    assert (together.values == 2).sum() == len(examples)
    for i in (0, 3, 70):
        alone = cells.fill(model, book, [examples[i]])
        mine = together.sentences == i
        assert (together.cells[mine] == alone.cells).all()
        assert (together.values[mine] == alone.values).all()


@pytest.mark.parametrize(
    ("rest", "own"), [("", "train"), (None, "train"), ("absent", "train"), ("test", "train"), ("train", "")]
)
def test_one_record_cannot_decide_how_the_others_are_read(counts, tmp_path, rest, own):
    """Not by what its `split` says either; and the command ends alike."""
    split = {} if rest == "absent" else {"split": rest}
    base, extra = rows(OTHERS, **split), rows([("stone river", "das haus")], split=own)
    got = [counts(write(tmp_path / "a.jsonl", listed)) for listed in (base, extra + base, base + extra)]
    assert (len(got[0]) > 20) == (rest != "test")
    assert got[1] == got[2]
    assert set((got[1] - got[0]).values()) == {1}
    assert not got[0] - got[1]


def test_no_usable_pair_is_released_like_few(counts, tmp_path):
    assert counts(write(tmp_path / "blank.jsonl", rows([("", "leer")]))) == Counter()
    assert counts(write(tmp_path / "empty.jsonl", [])) == Counter()


def test_a_memory_is_of_the_whole_file(public, tmp_path, capsys):
    """A store sets nothing aside, and so no opted-out line is said to be nobody's that is there."""
    (tmp_path / "no").write_text("".join(f"{a}\n" for a, _ in HUB), encoding="utf-8")
    path = write(tmp_path / "a.jsonl", rows(HUB + OTHERS))
    argv = ["store", "--model", public, "--data", path, "--opt-out", tmp_path / "no", "--out", tmp_path / "o"]
    status, said = run(capsys, *argv)
    assert status == 0
    assert (said["pairs"], said["left_out"], said["notes"]) == (len(OTHERS), len(HUB), [])
    assert main(["account", "report", str(tmp_path / "o")]) == 0
    assert "epsilon: none" in capsys.readouterr().out
    status, said = run(capsys, *argv[:4], write(tmp_path / "b.jsonl", rows(HUB, split="test")), *argv[5:])
    assert status == 2
    assert "no usable pair" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-sentences", "3"], "--min-sentences does not go with --epsilon"),
        (["--delta", "1e-19"], "--delta must be in [1e-18, 0.01)"),
        (["--delta", "0.999"], "--delta must be in [1e-18, 0.01)"),
        (["--delta", "nan"], "--delta must be in [1e-18, 0.01)"),
        (["--max-buckets", "0"], "--max-buckets must be in [1, 65536]"),
        (["--max-buckets", "1" + 400 * "0"], "--max-buckets must be in [1, 65536]"),
        (["--epsilon", "101"], "--epsilon must be at most 100"),
    ],
)
def test_noise_that_would_promise_too_much_is_refused(public, tmp_path, capsys, options, message):
    path = write(tmp_path / "a.jsonl", rows(OTHERS))
    status, said = run(capsys, *store(public, path, tmp_path / "out"), *options)
    assert status == 2
    assert message in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "option", [("--delta", "1e-4"), ("--max-buckets", "3"), ("--adjacency", "add-remove")]
)
def test_options_of_a_guarantee_without_its_epsilon_are_refused(public, tmp_path, capsys, option):
    """They would be ignored, and every record written."""
    argv = [
        "store",
        "--model",
        public,
        "--data",
        write(tmp_path / "a.jsonl", rows(OTHERS)),
        "--out",
        tmp_path / "out",
    ]
    status, said = run(capsys, *argv, *option)
    assert status == 2
    assert f"{option[0]} is for a noisy histogram; give --epsilon too" in said
    assert not (tmp_path / "out").exists()


def test_codes_of_records_are_no_cells(public, tmp_path, capsys):
    centroids = np.random.default_rng(0).standard_normal((4, 8, 4))
    datastore.save_codebook(tmp_path / "codebook.npz", pq.Codebook(jnp.asarray(centroids, jnp.float32)))
    path = write(tmp_path / "a.jsonl", rows(OTHERS))
    argv = ["store", "--model", public, "--codebook", tmp_path / "codebook.npz", "--data", path]
    status, said = run(capsys, *argv, "--out", tmp_path / "out", *PRIVATE)
    assert status == 2
    assert "has codes of 4 parts" in said
    assert run(capsys, *argv, "--out", tmp_path / "out")[0] == 0


def test_a_codebook_of_another_model_is_refused(public, tmp_path, capsys):
    other = tmp_path / "codebook.npz"
    codebook = datastore.load_codebook(public / "cells.npz")
    path = write(tmp_path / "a.jsonl", rows(OTHERS))
    for made_for, accepted in (("f" * 64, False), (data.load(public).digest, True), ("", True)):
        datastore.save_codebook(other, codebook, made_for)
        argv = ["store", "--model", public, "--codebook", other, "--data", path]
        status, said = run(capsys, *argv, "--out", tmp_path / f"out{made_for[:4]}")
        assert (status == 0) == accepted
        assert accepted or "is of another model (ffffffffffff) than the one given" in said


def test_a_folder_of_the_users_is_never_touched(public, tmp_path, capsys, monkeypatch):
    path = write(tmp_path / "a.jsonl", rows(OTHERS))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    argv = ["store", "--model", public, "--data", path, "--out"]
    status, said = run(capsys, *argv, tmp_path / "mine")
    assert status == 2
    assert "exists already; choose another folder" in said
    monkeypatch.setattr(datastore, "append", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["translation", *map(str, argv), str(tmp_path / "new")]) == 130
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "mine"]
    assert (tmp_path / "mine" / "letter").read_text() == "dear"


def test_a_killed_store_leaves_no_memory_and_the_next_one_sweeps_up(public, tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", rows(OTHERS))
    argv = ["store", "--model", str(public), "--data", str(path), "--out", str(tmp_path / "out")]
    script = (
        "import time; from trainers.cli import main; from trainers.translation import datastore\n"
        "real = datastore.append\n"
        "def slow(*a, **k):\n"
        "    real(*a, **k); print('appended', flush=True); time.sleep(60)\n"
        f"datastore.append = slow; main({['translation', *argv]!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "appended\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "out").exists()
    (left,) = [p for p in tmp_path.iterdir() if p.name.startswith(".out.")]
    assert stat.S_IMODE(left.stat().st_mode) == 0o700
    assert run(capsys, *argv)[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_private_text_is_for_its_owner_only(public, tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", rows(OTHERS))
    assert run(capsys, "store", "--model", public, "--data", path, "--out", tmp_path / "out")[0] == 0
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700
    for file in (tmp_path / "out").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0 or file.name == ".lock"


def test_opted_out_lines_are_cleaned_as_pairs_are_and_strays_are_reported(tmp_path):
    train = [
        Pair("Café house", "a"),
        Pair("two  blanks".replace("  ", " "), "b"),
        Pair("stays", "c"),
        Pair("first", "d"),
    ]
    lines = "\ufefffirst\nCafe\u0301 house\ntwo  \u00a0blanks \n\nStays\nnobody's\n"
    (tmp_path / "no").write_text(lines, encoding="utf-8")
    kept, said = store_command.opted_out(train, tmp_path / "no")
    assert kept == [Pair("stays", "c")]
    assert said == [f"2 of 5 lines of {tmp_path / 'no'} are no pair's source (line 5, 6)"]
    assert store_command.opted_out(train, None) == (train, [])
