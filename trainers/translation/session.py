"""`train` and `evaluate`: a run folder from start to finish."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from typing import Any

from trainers.common import files, manifest, metrics
from trainers.common import run_dir as folders
from trainers.common.errors import InputError
from trainers.translation import corpora, experiment, report, scoring
from trainers.translation.config import METHODS, Config

RESULTS = "metrics.jsonl"


def train(config: Config) -> tuple[dict[str, Any], str]:
    """Runs every (setting, trial, method) that the run folder does not hold yet; returns `(result, text)`.

    Raises:
      InputError: the folder exists and --resume was not given, or holds a run of other settings.
    """
    start = time.time()
    run_dir = pathlib.Path(config.run_dir)
    if run_dir.exists() and any(run_dir.iterdir()) and not config.resume:
        raise InputError(f"--run-dir {run_dir} exists; add --resume to continue it, or give another folder")
    read = corpora.load(config)
    run_dir.mkdir(parents=True, exist_ok=True)
    _check_same(run_dir, config)
    found = corpora.digest(read)
    manifest.write(run_dir, command="translation train", config=config, digests={"pairs": found})
    bench = experiment.Bench(config, read, run_dir)
    records = _records(run_dir)
    have = {(r["setting"], r["trial"], r["method"]) for r in records if r["pairs"] == found}
    records = [r for r in records if r["pairs"] == found]
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
    return _report(config, run_dir, records, read.notes, time.time() - start)


def _records(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    return metrics.read(run_dir / RESULTS) if (run_dir / RESULTS).exists() else []


FREE = ("settings", "methods", "trials", "resume", "json", "run_dir")
"""Options that a resumed run may change: they add to what is compared, or change nothing of it."""


def _check_same(run_dir: pathlib.Path, config: Config) -> None:
    place = run_dir / "config.json"
    if not place.exists():
        return
    folders.require_command(run_dir, "translation train")
    before = json.loads(place.read_text(encoding="utf-8"))
    now = manifest.config_dict(config)
    for name in (f.name for f in dataclasses.fields(config)):
        if name not in FREE and before.get(name) != now[name]:
            raise InputError(
                f"--run-dir {run_dir} holds a run with --{name.replace('_', '-')} {before.get(name)}, "
                f"now {now[name]}; give another folder"
            )


def _report(config, run_dir, records, notes, seconds) -> tuple[dict[str, Any], str]:
    """Of everything that the folder holds, so that a table made in several calls is whole."""
    settings = list(dict.fromkeys([*config.settings, *(r["setting"] for r in records)]))
    records.sort(key=lambda r: (settings.index(r["setting"]), METHODS.index(r["method"]), r["trial"]))
    methods = [m for m in METHODS if m in config.methods or any(r["method"] == m for r in records)]
    signature = scoring.score(["a"], ["a"]).bleu_signature
    tables = [report.table(records, s, signature) for s in settings]
    words = report.statement(methods, config.key_encryption)
    with files.atomic_write(run_dir / "results.md") as file:
        file.write("\n".join(tables))
    with files.atomic_write(run_dir / "privacy.md") as file:
        file.write(words)
    guarantee = report.guarantees(methods)
    with files.atomic_write(run_dir / "privacy.json") as file:
        json.dump({"epsilon": None, "guarantee": guarantee}, file, indent=1)
    report.pictures(records, run_dir)
    first = [r for r in records if r["setting"] == config.settings[0]]
    shared = [r for r in first if r["method"] == "fednn"] or first
    result = {
        "run_dir": str(run_dir),
        "bleu": report.mean_scores(records, config.settings[0]),
        "chrf": report.mean_scores(records, config.settings[0], "chrf"),
        "guarantee": guarantee,
        "bytes_up": shared[0]["bytes_up"] if shared else 0,
        "bytes_down": shared[0]["bytes_down"] if shared else 0,
        "seconds": seconds,
        "signature": signature,
    }
    said = "".join(f"note: {n}\n" for n in notes)
    text = "\n".join([*tables, words]) + said + f"\nWritten to {run_dir} in {seconds:.0f} s."
    return result, text


def evaluate(run_dir: str) -> tuple[dict[str, Any], str]:
    """Scores a finished or broken-off run again from its folder: what is missing is computed, the rest is
    read.
    """
    return train(read_config(run_dir))


def read_config(run_dir: str) -> Config:
    """The settings of a run folder, ready to continue it."""
    folders.require_command(pathlib.Path(run_dir), "translation train")
    place = files.existing_file(pathlib.Path(run_dir) / "config.json", "run description")
    record = json.loads(place.read_text(encoding="utf-8"))
    for field in dataclasses.fields(Config):
        if isinstance(record.get(field.name), list):
            record[field.name] = tuple(record[field.name])
    try:
        config = Config(**{**record, "run_dir": run_dir, "resume": True, "json": False})
    except TypeError as error:
        raise InputError(f"{place} is not the description of a translation run ({error})") from error
    return config
