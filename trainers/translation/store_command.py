"""`jaxpriv translation store`: private pairs become a memory of coded keys, or a noisy histogram."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro

from accounting import PrivacyStatement
from jaxpriv import pq
from trainers.common import entropy, files, parallel_text, progress
from trainers.common.errors import InputError
from trainers.common.pairs import Pair, clean
from trainers.translation import cells, corpora, data, datastore, facts, release, report, retrieval
from trainers.translation import model as models
from trainers.translation.config import Required

RELEASE = "release.json"
"""Beside a noisy histogram: how it was made, for `share` to send along."""


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Client: turn private pairs into a memory of coded keys and true next pieces."""

    model: str = "runs/translation/public"
    """Folder of the public model."""
    codebook: str | None = None
    """The server's codebook; none keeps keys as they are."""
    data: Required = ""
    """Private pairs: FILE or FILE:sub=a,b; of several parts the train file, of one file every record but those whose
    `split` says something else than train: which pairs are in depends on each pair alone."""
    source_field: str = "en"
    """Field (or language) of the source side."""
    target_field: str = "de"
    """Field (or language) of the target side."""
    out: Required = ""
    """Folder for the memory."""
    min_sentences: int = 1
    """Keep only records whose value occurs in so many of these sentences; a habit, no guarantee."""
    opt_out: str | None = None
    """File of source sentences, one a line, whose pairs stay out of the memory and of that count; lines that are
    nobody's are reported."""
    skip_bad: bool = False
    """Leave bad records of --data out and count them, rather than stop at the first."""
    epsilon: float | None = None
    """Instead of records: a noisy histogram with this epsilon for every sentence pair. Needs --delta, --adjacency
    and a --codebook of cells (public/cells.npz, which `release` writes)."""
    delta: float | None = None
    """With --epsilon: well below one in the number of pairs."""
    adjacency: Annotated[
        Literal["", "add-remove", "replace-one"],
        tyro.conf.arg(help_behavior_hint="(required with --epsilon)"),
    ] = ""
    """With --epsilon: a pair more or less, or one exchanged."""
    max_buckets: int = 16
    """With --epsilon: (cell, value) buckets that a pair fills at most."""
    json: bool = False
    """Print one JSON object as the last line."""


def run_store(config: StoreConfig) -> tuple[dict[str, Any], str]:
    """Writes the memory of a client's pairs, whole or not at all."""
    if not config.data or not config.out:
        raise InputError("--data FILE and --out FOLDER are needed")
    if config.min_sentences < 1:
        raise InputError(f"--min-sentences must be at least 1, got {config.min_sentences}")
    if config.epsilon is None:
        for name in ("delta", "adjacency", "max_buckets"):
            if getattr(config, name) != getattr(StoreConfig, name):
                raise InputError(
                    f"--{name.replace('_', '-')} is for a noisy histogram; give --epsilon too, or leave it out"
                )
    settings = None if config.epsilon is None else _calibrated(config, config.epsilon)
    model = data.load(config.model)
    codebook = None if config.codebook is None else datastore.load_codebook(config.codebook, model.digest)
    if settings is not None and not isinstance(codebook, pq.Codebook):
        raise InputError("--epsilon needs a --codebook of cells: public/cells.npz, which `release` writes")
    if settings is not None and isinstance(codebook, pq.Codebook) and len(codebook.centroids) != 1:
        raise InputError(
            f"--epsilon needs a --codebook of cells (public/cells.npz, which `release` writes), and {config.codebook} "
            f"has codes of {len(codebook.centroids)} parts, which would make a cell of almost every record"
        )
    facts.facts_of(model, codebook)
    path, subs = corpora.parse_source(config.data)
    options: dict[str, Any] = {"source_field": config.source_field, "target_field": config.target_field}
    options |= {"sub": subs, "skip_bad": config.skip_bad}
    train, notes = parallel_text.read_train(path, may_be_empty=settings is not None, **options)
    with files.new_folder(config.out) as folder:
        pairs, said = opted_out(train, config.opt_out)
        examples = model.vocabulary.examples(pairs)
        if settings is None:
            guarantee = report.GUARANTEE["fednn"]
            count = write_store(folder, model, codebook, examples, min_sentences=config.min_sentences)
        else:
            assert isinstance(codebook, pq.Codebook)
            count, statement = write_histogram(folder, model, codebook, examples, settings)
            guarantee = statement.sentence
    result = {"pairs": len(pairs), "records": count, "folder": config.out, "guarantee": guarantee}
    result |= {"left_out": len(train) - len(pairs), "notes": [*notes, *said]}
    noted = "".join(f"note: {line}\n" for line in result["notes"])
    left = "" if config.opt_out is None else f", {result['left_out']} pairs left out"
    return result, f"{noted}{count} records of {len(pairs)} pairs in {config.out}{left}. {guarantee}"


def opted_out(train: list[Pair], path: files.PathLike | None) -> tuple[list[Pair], list[str]]:
    """The pairs whose source is no line of the file, and a line about lines that are no pair's source.

    Lines are cleaned as pairs are (NFC, single blanks, no byte order mark), so that what looks equal is equal.
    """
    if path is None:
        return train, []
    lines = {number: clean(line) for number, line in enumerate(parallel_text.read_lines(path), 1)}
    lines = {number: line for number, line in lines.items() if line}
    sources = {pair.source for pair in train}
    unknown = [str(number) for number, line in lines.items() if line not in sources]
    left = set(lines.values())
    said = []
    if unknown:
        shown = ", ".join(unknown[:10]) + (", ..." if len(unknown) > 10 else "")
        said.append(f"{len(unknown)} of {len(lines)} lines of {path} are no pair's source (line {shown})")
    return [pair for pair in train if pair.source not in left], said


class Settings(NamedTuple):
    """A release, and the delta of its statement."""

    release: release.ReleaseConfig
    delta: float


def _calibrated(config: StoreConfig, epsilon: float) -> Settings:
    """The release that was asked for; everything about it is refused here, before anything is read."""
    if config.delta is None:
        raise InputError("--delta is needed with --epsilon: well below one in the number of pairs")
    if not config.adjacency:
        raise InputError("--adjacency is needed with --epsilon: add-remove or replace-one")
    if config.min_sentences != 1:
        raise InputError(
            "--min-sentences does not go with --epsilon: a pair's records would depend on other pairs; leave it out"
        )
    release.check(epsilon, config.delta, config.max_buckets, option="--epsilon")
    settings = release.calibrate(
        epsilon=epsilon,
        delta=config.delta,
        max_buckets=config.max_buckets,
        unit="sentence",
        adjacency=config.adjacency,
    )
    return Settings(settings, config.delta)


def write_histogram(
    folder: files.PathLike, model: data.Model, codebook: pq.Codebook, examples, settings: Settings
) -> tuple[int, PrivacyStatement]:
    """Writes the noisy histogram of these pairs as a weighted memory; returns its buckets and its guarantee."""
    form = facts.facts_of(model, codebook, weighted=True)
    counted = release.histogram(
        *cells.fill(model, codebook, examples), max_buckets=settings.release.max_buckets, unit="sentence"
    )
    shown = release.release(entropy.key_from_words(entropy.secret_words()), counted, settings.release)
    statement = release.statement(settings.release, delta=settings.delta)
    target = datastore.create(folder, form, codebook)
    datastore.append(target, form, keys=shown.cells, values=shown.values, weights=shown.counts)
    with files.atomic_write(target / "privacy.json") as file:
        file.write(statement.json())
    with files.atomic_write(target / RELEASE) as file:
        json.dump(release.as_json(settings.release, delta=settings.delta), file, indent=1)
    return len(shown.counts), statement


def write_store(
    folder: files.PathLike, model: data.Model, codebook, examples, *, min_sentences: int = 1
) -> int:
    """Writes the memory of these pairs and returns its number of records; values in fewer than `min_sentences` of
    them stay out.
    """
    form = facts.facts_of(model, codebook)
    pieces = [[*e.target, models.END] for e in examples]
    values = np.concatenate([*pieces, np.zeros(0)]).astype(np.int64)
    owners = np.repeat(np.arange(len(pieces)), [len(p) for p in pieces])
    frequent = np.unique(values[release.frequent(values, owners, min_sentences=min_sentences)])
    target = datastore.create(folder, form, codebook)
    count = 0
    with progress.bar(total=len(examples), what="memory", unit="pair") as bar:
        for part in retrieval.entries(model.graphdef, model.params, examples):
            keep = np.isin(part.values, frequent)
            coded = datastore.encode(form, codebook, part.keys[keep])
            count = datastore.append(target, form, keys=coded, values=part.values[keep])
            bar.update(len(np.unique(part.sentences)))
    return count
