"""Seeds that would collide, and paths with nothing behind them: every command refuses them in one line, status 2."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from jaxpriv import keys
from trainers import cli
from trainers.documents import config as documents_config
from trainers.documents import preparation, release
from trainers.translation import private_memory

ROOT = pathlib.Path(__file__).resolve().parents[2]
NO_SEED = (-1, 2**64)
BEYOND_32_BITS = (2**32 + 1, 2**63)
TRANSLATION = ("translation", "train", "--preset", "tiny", "--server", "x.jsonl", "--client", "a=y.jsonl")
RELEASE = ("documents", "release", "--run-dir", "fit", "--data", "x", "--output", "y", "--epsilon", "5")
MEMORY = ("translation", "release", "--run-dir", "run", "--delta", "1e-4", "--adjacency", "add-remove")
SEEDED = [  # a command, its option, and whether the option takes 64 bits
    (("keyboard", "train", "--preset", "tiny"), "--seed", False),
    (("keyboard", "train", "--preset", "tiny"), "--insecure-noise-seed", False),
    (("keyboard", "rescore", "--run-dir", "run"), "--seed", False),
    (("documents", "fit"), "--seed", True),
    (("documents", "evaluate"), "--seed", True),
    (("documents", "evaluate"), "--insecure-noise-seed", True),
    (RELEASE, "--insecure-noise-seed", True),
    (TRANSLATION, "--seed", False),
    (("translation", "attack", "--model", "m", "--attacker", "x", "--defender", "a=y"), "--seed", False),
    (MEMORY, "--insecure-noise-seed", True),
]


def refusal(capsys, *argv):
    """The one line on standard error of a command that ends with status 2."""
    assert cli.main([str(word) for word in argv]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.strip().splitlines()
    assert line.startswith(f"jaxpriv {argv[0]}")
    return line


@pytest.mark.parametrize(("command", "option", "wide"), SEEDED, ids=lambda value: str(value)[:40])
def test_seeds_that_would_be_another_are_refused(tmp_path, monkeypatch, capsys, command, option, wide):
    """In JAX 1 and 2^32 + 1 are one seed, -1 and 2^32 - 1 are one, and 2^63 is an OverflowError (AC56)."""
    monkeypatch.chdir(tmp_path)
    for seed in (*NO_SEED, *(() if wide else BEYOND_32_BITS)):
        line = refusal(capsys, *command, option, seed)
        assert option in line
        assert str(seed) in line
    assert not list(tmp_path.iterdir())


def test_seeds_of_64_bits_give_keys_of_their_own(tmp_path):
    """Where a command takes more than 32 bits, all of them count (AC56)."""
    assert (jax.random.key_data(jax.random.key(1)) == jax.random.key_data(jax.random.key(2**32 + 1))).all()
    seeds = (0, 1, 2**32 - 1, 2**32 + 1, 2**63, 2**64 - 1)

    def memory(seed):
        return private_memory._noise_key(private_memory.PrivateConfig(insecure_noise_seed=seed), 0)

    def document(seed):
        asked = documents_config.ReleaseConfig(
            run_dir="", data="", output="", epsilon=1.0, insecure_noise_seed=seed
        )
        return release.document_keys(asked, ["one"], [0])[0]

    def public(seed):
        return preparation.public_root(
            dataclasses.replace(documents_config.PRESETS["tiny"], seed=seed), "candidates"
        )

    for key in (keys.root, lambda seed: preparation.secret_key(tmp_path, seed), memory, document, public):
        made = {np.asarray(jax.random.key_data(key(seed))).tobytes() for seed in seeds}
        assert len(made) == len(seeds)


PATHS = [  # a command with PATH where the path goes
    ("keyboard", "train", "--preset", "tiny", "--public", "none", "--data", "PATH"),
    ("keyboard", "train", "--preset", "tiny", "--data", "clients.jsonl", "--public", "PATH"),
    (
        "keyboard",
        "train",
        "--preset",
        "tiny",
        "--data",
        "clients.jsonl",
        "--public",
        "none",
        "--vocabulary",
        "PATH",
    ),
    ("keyboard", "evaluate", "--run-dir", "PATH"),
    ("keyboard", "suggest", "--run-dir", "PATH", "--text", "we"),
    ("keyboard", "compose", "--run-dir", "PATH", "--text", "we"),
    ("keyboard", "export", "--run-dir", "PATH", "--output", "model.safetensors"),
    ("documents", "fit", "--data", "PATH", "--run-dir", "fit", "--encoder", "ENCODER"),
    ("documents", "fit", "--run-dir", "fit", "--encoder", "PATH"),
    ("documents", "release", "--run-dir", "PATH", "--data", "x", "--output", "y", "--epsilon", "5"),
    (
        "translation",
        "train",
        "--preset",
        "tiny",
        "--server",
        "PATH",
        "--client",
        "a=clients.jsonl",
        "--run-dir",
        "r",
    ),
    ("translation", "translate", "--model", "PATH", "--input", "clients.jsonl"),
    ("data", "inspect", "PATH"),
    ("data", "prepare", "PATH", "--output", "out.jsonl"),
    ("account", "report", "PATH"),
]


@pytest.mark.parametrize("kind", ["absent", "a folder", "empty"])
@pytest.mark.parametrize("command", PATHS, ids=lambda c: " ".join(c)[:60])
def test_paths_with_nothing_behind_them_are_named(tmp_path, monkeypatch, capsys, command, kind):
    """A path that does not exist, a folder, and a file of 0 bytes (AC57)."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "place.jsonl"
    if kind == "a folder":
        place.mkdir()
    elif kind == "empty":
        place.touch()
    clients = [f'{{"client_id": "c{i}", "text": "we see tea", "split": "train"}}\n' for i in range(40)]
    (tmp_path / "clients.jsonl").write_text("".join(clients))
    before = sorted(tmp_path.rglob("*"))
    if "ENCODER" in command:  # it is opened before the data
        monkeypatch.setattr(preparation, "open_encoder", lambda name: types.SimpleNamespace(digest=name))
    line = refusal(capsys, *(str(place) if word == "PATH" else word for word in command))
    assert str(place) in line
    assert sorted(tmp_path.rglob("*")) == before


def test_the_process_ends_with_status_2_and_no_stack_trace(tmp_path):
    """(AC57)"""
    command = [sys.executable, "-m", "trainers", "data", "inspect", str(tmp_path / "absent.jsonl")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("jaxpriv data: ")
    assert str(tmp_path / "absent.jsonl") in line
