"""`train` and `evaluate`: a run folder from start to finish."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import time
import typing
from typing import Any

from trainers.common import files, manifest, metrics
from trainers.common import run_dir as folders
from trainers.common.errors import InputError
from trainers.translation import checks, corpora, data, experiment, report, scoring
from trainers.translation.config import METHODS, Config

COMMAND, RESULTS = "translation train", "metrics.jsonl"

READING = 2
"""How pairs are read and filtered; in 1, which wrote no such number, the server's train pairs alone were filtered."""


def train(config: Config) -> tuple[dict[str, Any], str]:
    """Runs every (setting, trial, method) that the run folder does not hold yet; returns `(result, text)`.

    Whatever can be refused is refused before anything is written.

    Raises:
      InputError: the folder exists and --resume was not given, or holds a run of other settings or data.
    """
    start = time.time()
    with folders.held(config.run_dir):
        return _train(config, start)


def _train(config: Config, start: float) -> tuple[dict[str, Any], str]:
    run_dir = pathlib.Path(config.run_dir)
    begun = _begun(run_dir, resume=config.resume)
    if begun:
        _check_same(run_dir, config)
    read = _load(run_dir, config) if begun else corpora.load(config)
    found = corpora.digest(read)
    public = _finished_model(run_dir, config)
    sides = None if config.public_model is None else data.trained_on(config.public_model)
    checks.before_writing(config, read, public.config.dim if public else config.dim, sides)
    if begun:
        _check_same_data(run_dir, found, public.digest if public else None, read.notes)
    records = _records(run_dir)
    digests = {"pairs": found, **({"model": public.digest} if public else {})}
    reading = reading_of(run_dir) if begun else READING
    _write_manifest(run_dir, config, digests, reading)
    try:
        bench = experiment.Bench(config, read, run_dir)
    except InputError:
        if not begun:  # such as a vocabulary too large for the text: nothing is there that is worth keeping
            for each in run_dir.iterdir():
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        raise
    if not public:
        _write_manifest(run_dir, config, {**digests, "model": bench.model.digest}, reading)
    records = [r for r in records if r["pairs"] == found]
    have = {(r["setting"], r["trial"], r["method"]) for r in records}
    with metrics.Writer(run_dir / RESULTS) as writer:
        for setting in config.settings:
            for trial in range(config.trials):
                for method in config.methods:
                    if (setting, trial, method) in have:
                        continue
                    outcome = experiment.run_setting(bench, setting, trial, method)
                    record = {
                        "setting": setting,
                        "trial": trial,
                        "method": method,
                        "pairs": found,
                        **outcome._asdict(),
                    }
                    writer.write(**record)
                    records.append(record)
    seen = None if config.public_model is None else corpora.seen(read, sides)
    return _report(config, run_dir, records, read, seen, time.time() - start)


def reopen(run_dir: str) -> tuple[Config, corpora.Corpora]:
    """The settings and the pairs of a run folder, for a command that adds to it; other data than its own is refused."""
    config, place = read_config(run_dir), pathlib.Path(run_dir)
    read = _load(place, config)
    checks.check_public(read, None if config.public_model is None else data.trained_on(config.public_model))
    public = _finished_model(place, config)
    _check_same_data(place, corpora.digest(read), public.digest if public else None, read.notes)
    return config, read


def _begun(run_dir: pathlib.Path, *, resume: bool) -> bool:
    """Whether the folder holds a run that is to be continued."""
    if run_dir.exists() and not run_dir.is_dir():
        raise InputError(f"--run-dir {run_dir} is a file; give a folder")
    resume = folders.resumes(run_dir, resume)
    if not run_dir.exists() or not any(run_dir.iterdir()) or folders.never_began(run_dir, COMMAND):
        return False
    if not resume:
        raise InputError(f"--run-dir {run_dir} exists; add --resume to continue it, or give another folder")
    folders.require(run_dir, COMMAND)
    return True


def reading_of(run_dir: pathlib.Path) -> int:
    """How the run in the folder read its pairs (`READING`)."""
    return folders.read_manifest(run_dir).get("reading", 1) if (run_dir / "manifest.json").is_file() else 1


def _load(run_dir: pathlib.Path, config: Config) -> corpora.Corpora:
    """Reads the pairs as the run in the folder first did."""
    if reading_of(run_dir) >= READING:
        return corpora.load(config)
    read = corpora.load(config, filtered=False)
    read.notes.append(
        f"{run_dir} was begun when only the server's train pairs were filtered against test sets, and is continued so"
    )
    return read


def _finished_model(run_dir: pathlib.Path, config: Config) -> data.Model | None:
    """The public model, if it is there already."""
    if config.public_model is not None:
        return data.load(config.public_model)
    return data.load(run_dir / "public") if (run_dir / "public" / data.FACTS).exists() else None


def _check_same_data(run_dir: pathlib.Path, pairs: str, model: str | None, notes: list[str]) -> None:
    """Refuses other pairs or another public model than the run began with."""
    digests = folders.read_manifest(run_dir).get("digests") if (run_dir / "manifest.json").is_file() else None
    digests = digests if isinstance(digests, dict) else {}
    if digests.get("pairs", pairs) != pairs:
        raise InputError(
            f"--run-dir {run_dir} began with other pairs: a file has changed, or was divided by an earlier version; "
            "restore the files, or give another folder"
        )
    if model is not None and digests.get("model", model) != model:
        raise InputError(
            f"--run-dir {run_dir} began with another public model ({str(digests['model'])[:12]}, now {model[:12]}); "
            "restore it, or give another folder"
        )
    if model is not None and "model" not in digests:
        notes.append(f"{run_dir} does not say which public model it began with; taken to be the present one")


def _write_manifest(run_dir: pathlib.Path, config: Config, digests: dict[str, str], reading: int) -> None:
    manifest.write(run_dir, command=COMMAND, config=config, digests=digests, reading=reading)


def _records(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    place = run_dir / RESULTS
    records = metrics.read(place, _FIELDS) if place.exists() else []
    for number, record in enumerate(records, 1):
        if record["method"] not in METHODS:
            raise InputError(
                f"{place}, record {number}: no method {record['method']!r:.40}; the file was damaged"
            )
    return records


_FIELDS = {
    "setting": str,
    "method": str,
    "pairs": str,
    "trial": int,
    **typing.get_type_hints(experiment.Outcome),
}
"""What a record of results has."""

FREE = ("settings", "methods", "trials", "resume", "json", "run_dir")
"""Options that a resumed run may change: they add to what is compared, or change nothing of it."""


def _check_same(run_dir: pathlib.Path, config: Config) -> None:
    before = folders.read_config(run_dir)
    now = manifest.config_dict(config)
    for field in dataclasses.fields(config):
        name = field.name
        # An option that is newer than the folder had its default.
        if name not in FREE and before.get(name, field.default) != now[name]:
            raise InputError(
                f"--run-dir {run_dir} holds a run with --{name.replace('_', '-')} {before.get(name)}, "
                f"now {now[name]}; give another folder"
            )


def _report(
    config, run_dir, records, read: corpora.Corpora, seen: corpora.Seen | None, seconds
) -> tuple[dict[str, Any], str]:
    """Of everything that the folder holds, so that a table made in several calls is whole."""
    settings = list(dict.fromkeys([*config.settings, *(r["setting"] for r in records)]))
    records.sort(key=lambda r: (settings.index(r["setting"]), METHODS.index(r["method"]), r["trial"]))
    methods = [m for m in METHODS if m in config.methods or any(r["method"] == m for r in records)]
    signature = scoring.score(["a"], ["a"]).bleu_signature
    tables = [report.table(records, s, signature) for s in settings]
    shared = read.shared()
    words = report.statement(methods, config.key_encryption, shared, seen)
    with files.atomic_write(run_dir / "results.md") as file:
        file.write("\n".join(tables))
    with files.atomic_write(run_dir / "privacy.md") as file:
        file.write(words)
    guarantee = report.guarantees(methods)
    with files.atomic_write(run_dir / "privacy.json") as file:
        json.dump({"epsilon": None, "guarantee": guarantee}, file, indent=1)
    report.pictures(records, run_dir)
    first = [r for r in records if r["setting"] == config.settings[0]]
    shown = [r for r in first if r["method"] == "fednn"] or first
    result = {
        "run_dir": str(run_dir),
        "bleu": report.mean_scores(records, config.settings[0]),
        "chrf": report.mean_scores(records, config.settings[0], "chrf"),
        "guarantee": guarantee,
        "shared_pairs": shared,
        "bytes_up": shown[0]["bytes_up"] if shown else 0,
        "bytes_down": shown[0]["bytes_down"] if shown else 0,
        "seconds": seconds,
        "signature": signature,
    }
    said = "".join(f"note: {n}\n" for n in read.notes)
    text = "\n".join([*tables, words]) + said + f"\nWritten to {run_dir} in {seconds:.0f} s."
    return result, text


def evaluate(run_dir: str) -> tuple[dict[str, Any], str]:
    """Scores a finished or broken-off run again from its folder: what is missing is computed, the rest is
    read.
    """
    return train(read_config(run_dir))


def read_config(run_dir: str) -> Config:
    """The settings of a run folder, ready to continue it."""
    folders.require_command(pathlib.Path(run_dir), COMMAND)
    place = files.existing_file(pathlib.Path(run_dir) / "config.json", "run description")
    record = folders.read_config(pathlib.Path(run_dir))
    for field in dataclasses.fields(Config):
        if isinstance(record.get(field.name), list):
            record[field.name] = tuple(record[field.name])
    try:
        folders.require_types(record, Config)
        config = Config(**{**record, "run_dir": run_dir, "resume": True, "json": False})
    except TypeError as error:
        raise InputError(f"{place} is not the description of a translation run ({error})") from error
    return config
