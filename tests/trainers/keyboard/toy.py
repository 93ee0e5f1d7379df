"""A toy population with a text that a tiny model can learn, and the smallest settings that exercise everything."""

import dataclasses
import json
import pathlib

import numpy as np

from trainers.keyboard.config import TINY, Config

SUBJECTS, VERBS, OBJECTS = ("we", "you", "they"), ("see", "take", "like"), ("tea", "bread", "rain", "music")
RARE = "zqx"


def write_clients(path: pathlib.Path, *, clients: int = 24, seed: int = 0) -> pathlib.Path:
    """JSON lines with a split column; client 0 repeats one rare word."""
    rng = np.random.default_rng(seed)
    with open(path, "w", encoding="utf-8") as file:
        for c in range(clients + 8):
            split = "train" if c < clients else ("validation" if c % 2 else "test")
            texts = [
                " ".join((rng.choice(SUBJECTS), rng.choice(VERBS), rng.choice(OBJECTS)))
                for _ in range(rng.integers(1, 6))
            ]
            record = {"client_id": f"c{c}", "text": texts if c else [f"{RARE} {RARE} {RARE}"], "split": split}
            file.write(json.dumps(record) + "\n")
    return path


def write_vocabulary(path: pathlib.Path) -> pathlib.Path:
    path.write_text("".join(f"{word}\t9\n" for word in (*SUBJECTS, *VERBS, *OBJECTS)), encoding="utf-8")
    return path


def config(folder: pathlib.Path, run: str = "run", **changes) -> Config:
    """Settings of a run of a few seconds, on files made in `folder`."""
    data, words = folder / "clients.jsonl", folder / "public_words.tsv"
    if not data.exists():
        write_clients(data)
    if not words.exists():
        write_vocabulary(words)
    base = dataclasses.replace(
        TINY,
        data=str(data),
        public="none",
        vocabulary=str(words),
        vocabulary_size=10,
        run_dir=str(folder / run),
        rounds=6,
        report_goal=4,
        compare=False,
        chunk_size=2,
        sequence_length=4,
        evaluate_every=2,
        checkpoint_every=2,
        insecure_noise_seed=5,
    )
    return dataclasses.replace(base, **changes)


def argv(config: Config) -> list[str]:
    """The command line that gives these settings."""
    out = ["train", "--preset", "tiny"]
    for field in dataclasses.fields(Config):
        value, option = getattr(config, field.name), "--" + field.name.replace("_", "-")
        if value == getattr(TINY, field.name):
            continue
        if isinstance(value, bool):
            out.append(option if value else "--no-" + option[2:])
        elif isinstance(value, tuple):
            out += [option, *map(str, value)]
        else:
            out += [option, str(value)]
    return out
