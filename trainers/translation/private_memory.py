"""`jaxpriv translation release`: what a filter, and what an epsilon, cost in BLEU.

In a finished run's setting, every client shares its memory through a filter (values in at least q of its own
sentences), or, in place of records, its noisy histogram at several epsilons; everyone translates with the union. The
coarse quantizer and the Meta-k networks come from public text, so epsilon is the release's own. Buckets are searched by
the centroid of their cell, and their noisy counts weigh them.
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import accounting
from jaxpriv import keys, knn, pq
from trainers.common import entropy, files, metrics, plots
from trainers.common.errors import InputError
from trainers.translation import (
    cells,
    checks,
    corpora,
    datastore,
    dealing,
    decode,
    experiment,
    meta_k,
    release,
    retrieval,
    session,
)
from trainers.translation.config import Config

RESULTS = "release.jsonl"
SIMULATION = "Simulation: the noise comes from a public seed, and nothing is guaranteed. "
BUCKET_BYTES = 1 + 2 + 4 + 28  # cell, value, noisy count, nonce and tag


@dataclass(frozen=True, kw_only=True)
class PrivateConfig:
    """Measure what sharing less, or privately, costs: a filter and noisy histograms in a finished run."""

    run_dir: str = "runs/translation"
    """Folder that `train` wrote; results are added to it."""
    epsilons: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    """Of the histograms, one release each (they do not compose: a client makes one of them)."""
    delta: Annotated[float | None, tyro.conf.arg(help_behavior_hint="(required)")] = None
    """Of the histograms; well below one in the number of sentences. Must be given."""
    adjacency: Annotated[
        Literal["", "add-remove", "replace-one"], tyro.conf.arg(help_behavior_hint="(required)")
    ] = ""
    """Neighbouring data: a sentence pair more or less, or one exchanged. Must be given."""
    max_buckets: int = 16
    """Buckets that a sentence pair fills at most."""
    cells: int = 64
    """Centroids of the coarse quantizer, at most 256."""
    min_sentences: tuple[int, ...] = (2, 5)
    """The filter: a record is shared if its value occurs in so many of the client's sentences."""
    insecure_noise_seed: int | None = None
    """For tests: noise from this public number. What is released then has no guarantee."""
    json: bool = False
    """Print one JSON object as the last line."""


class Cells(NamedTuple):
    """What the public says of cells. coarse: their centroids. temperature, meta: how buckets are weighed."""

    coarse: pq.Codebook
    temperature: float
    meta: knn.MetaK


class Shared(NamedTuple):
    """What clients let go in one way. store, meta, temperature: how it is searched. count: records or buckets."""

    store: Any
    meta: knn.MetaK
    temperature: float
    count: int
    record_bytes: int


def run_release(config: PrivateConfig) -> tuple[dict[str, Any], str]:
    """Scores every way that the run folder does not hold yet; returns `(result, text)`."""
    delta = _check(config)
    run_dir = pathlib.Path(config.run_dir)
    session.read_config(config.run_dir)  # whose folder it is
    if config.epsilons and session.reading_of(run_dir) < session.READING:
        raise InputError(
            f"{run_dir} was begun by an earlier version, where clients' pairs decided which public ones were read: "
            "give a run begun anew, or --epsilons with nothing behind it"
        )
    run, read = session.reopen(config.run_dir)
    _check_adjacency(config, run, list(read.clients))
    if config.epsilons:
        said = checks.check_apart(read)
        if said:  # to the operator alone: how many is no released number
            print(f"jaxpriv translation: {said}", file=sys.stderr)
    bench = experiment.Bench(run, read, run_dir)
    made = _digest(bench, config)
    place = run_dir / RESULTS
    known = {
        "made": str,
        "way": str,
        "bleu": dict[str, float],
        "chrf": dict[str, float],
        "count": int,
        "bytes_up": int,
    }
    everywhere = {corpora.GENERAL, *bench.domains}
    # One that lacks a domain is measured anew.
    rows = [
        r
        for r in (metrics.read(place, known) if place.exists() else [])
        if r["made"] == made and r["bleu"].keys() >= everywhere
    ]
    ways = _ways(config, delta)
    coarse = functools.cache(lambda: _prepare(bench, config))
    counted = functools.cache(lambda: _counted(bench, config, coarse()))
    with metrics.Writer(place) as writer:
        for name, settings in ways.items():
            if name in {r["way"] for r in rows}:
                continue
            scores = _measure(bench, config, coarse, counted, name, settings)
            row = {"made": made, "way": name, "epsilon": settings.get("epsilon"), **scores}
            writer.write(**row)
            rows.append(row)
    rows = [next(r for r in rows if r["way"] == name) for name in ways]
    said = {name: _statement(config, s["release"], delta) for name, s in ways.items() if "release" in s}
    statements = {accounting.in_full(ways[name]["epsilon"]): data for name, data in said.items()}
    with files.atomic_write(run_dir / "release_privacy.json") as file:
        json.dump(statements, file, indent=1)
    text = _table(rows, list(said.values()), bench.domains)
    with files.atomic_write(run_dir / "release.md") as file:
        file.write(text)
    _picture(rows, bench.domains, run_dir / "release.png")
    guarantee = {
        row["way"]: "epsilon: none"
        if row["epsilon"] is None
        else (SIMULATION if config.insecure_noise_seed is not None else "")
        + f"epsilon: {accounting.in_full(row['epsilon'])} at delta {accounting.in_full(delta)}"
        for row in rows
    }
    result = {
        "run_dir": config.run_dir,
        "bleu": {r["way"]: r["bleu"] for r in rows},
        "released": {r["way"]: r["count"] for r in rows},
        "guarantee": guarantee,
    }
    return result, text + f"\nWritten to {run_dir}."


def _statement(config: PrivateConfig, made: release.ReleaseConfig, delta: float) -> dict[str, Any]:
    data = release.statement(made, delta=delta).data
    tests = "validation and test pairs, which are taken as given: train pairs that share a sentence with a test set of "
    tests += "another file were left out, and the scores were computed on them"
    data = {**data, "not_covered": [*data["not_covered"], tests]}
    if config.insecure_noise_seed is None:
        return data
    return {**data, "simulation": True, "sentence": SIMULATION + data["sentence"]}


def _check(config: PrivateConfig) -> float:
    if config.delta is None:
        raise InputError("--delta is needed: well below one in the number of sentences")
    if not config.adjacency:
        raise InputError("--adjacency is needed: add-remove or replace-one")
    if not 1 <= config.cells <= pq.MAX_CENTROIDS:
        raise InputError(f"--cells must be in [1, {pq.MAX_CENTROIDS}], got {config.cells}")
    for value in config.epsilons or (1.0,):
        release.check(value, config.delta, config.max_buckets, option="--epsilons")
    for value in config.min_sentences:
        if value < 1:
            raise InputError(f"--min-sentences must be at least 1, got {value}")
    entropy.check_insecure_seed(config.insecure_noise_seed)
    return config.delta


def _check_adjacency(config: PrivateConfig, run: Config, domains: Sequence[str]) -> None:
    """Refuses runs where a pair changes what others' pairs do, whatever the adjacency: one that is exchanged for a pair
    that its hash sets aside for testing leaves one pair fewer, and the others move up or are dealt anew.
    """
    if not config.epsilons:
        return
    if run.client_pairs:
        raise InputError(
            f"the run has --client-pairs {run.client_pairs}, where a pair displaces another; give a run without it, or "
            "--epsilons with nothing behind it"
        )
    if not dealing.by_domain(run.settings[0], len(domains)):
        raise InputError(
            f"in the run's setting {run.settings[0]} a pair changes who holds the others; give a run whose first "
            "setting is non_iid, or --epsilons with nothing behind it"
        )


def _digest(bench: experiment.Bench, config: PrivateConfig) -> str:
    run = bench.config
    parts = (config.delta, config.adjacency, config.max_buckets, config.cells, run.k, run.key_encryption)
    more = (run.subspaces, run.test_sentences, run.settings[0], config.insecure_noise_seed)
    return files.digest_of(bench.model.digest, corpora.digest(bench.read), repr(parts + more))[:20]


def _ways(config: PrivateConfig, delta: float) -> dict[str, dict[str, Any]]:
    """Every way of sharing, by the name it has in the table."""
    ways: dict[str, dict[str, Any]] = {"nothing (P-NMT)": {}, "all records (FedNN)": {"min_sentences": 1}}
    ways |= {f"records, value in {q} sentences": {"min_sentences": q} for q in config.min_sentences}
    ways["histogram without noise"] = {"histogram": True}
    for value in sorted(config.epsilons, reverse=True):
        made = release.calibrate(
            epsilon=value,
            delta=delta,
            max_buckets=config.max_buckets,
            unit="sentence",
            adjacency=config.adjacency,
        )
        ways[f"histogram, epsilon {accounting.in_full(value)}"] = {
            "histogram": True,
            "release": made,
            "epsilon": value,
        }
    return ways


def _measure(
    bench: experiment.Bench,
    config: PrivateConfig,
    coarse: Callable[[], Cells],
    counted: Callable[[], list[release.Histogram]],
    name: str,
    settings: dict[str, Any],
) -> dict[str, Any]:
    everywhere = [corpora.GENERAL, *bench.domains]
    if not settings:
        ways: experiment.Ways = dict.fromkeys(everywhere, (decode.plain(bench.graphdef), bench.params))
        bleu, chrf, _ = bench.judge(name, ways)
        return {"bleu": bleu, "chrf": chrf, "count": 0, "bytes_up": 0}
    bench.prepare()
    if settings.get("histogram"):
        shared = _histograms(config, coarse(), counted(), settings.get("release"))
    else:
        clients = [experiment.share_entries(bench, share) for share in _shares(bench)]
        shared = _filtered(bench, clients, settings["min_sentences"])
    stepper = retrieval.stepper(bench.graphdef, bench.retrieval())
    weights = retrieval.Weights(bench.params, shared.store, jnp.float32(shared.temperature), meta=shared.meta)
    bleu, chrf, _ = bench.judge(name, dict.fromkeys(everywhere, (stepper, weights)))
    return {"bleu": bleu, "chrf": chrf, "count": shared.count, "bytes_up": shared.count * shared.record_bytes}


def _shares(bench: experiment.Bench) -> list[dealing.Share]:
    sizes = {d: len(e) for d, e in bench.examples.items()}
    seed = experiment.trial_seed(bench.config.seed, 0, 0)
    return dealing.deal(bench.config.settings[0], sizes, seed=seed)


def _filtered(bench: experiment.Bench, clients: Sequence[retrieval.Entries], min_sentences: int) -> Shared:
    parts = []
    for own in clients:
        keep = release.frequent(own.values, own.sentences, min_sentences=min_sentences)
        parts.append(retrieval.Entries(*(column[keep] for column in own)))
    assert bench.meta is not None
    count = sum(len(p.values) for p in parts)
    return Shared(bench.store(parts), bench.meta, bench.temperature, count, experiment.record_bytes(bench))


def _prepare(bench: experiment.Bench, config: PrivateConfig) -> Cells:
    """Cells, and the network that weighs their buckets, from public held-out pairs alone."""
    vocabulary, root = bench.model.vocabulary, keys.root(bench.config.seed)
    public = retrieval.all_entries(bench.graphdef, bench.params, vocabulary.examples(bench.read.memory))
    coarse = jax.jit(pq.fit, static_argnames=("num_subspaces", "num_centroids"))(
        keys.stream(root, "translation-cells"),
        jnp.asarray(public.keys),
        num_subspaces=1,
        num_centroids=min(config.cells, len(public.keys)),
    )
    temperature = _spread(coarse, public.keys)
    filled = cells.Filled(_cells(coarse, public.keys), public.values, public.sentences)
    learned = weighted_store(coarse, [_count(config, filled)], temperature)
    questions = vocabulary.examples(bench.read.questions)
    positions = meta_k.look(bench.graphdef, bench.params, learned, questions, config=bench.retrieval())
    meta, _ = meta_k.fit(keys.stream(root, "translation-meta-cells"), positions, temperature=temperature)
    # What `store --epsilon` and `translate` take.
    datastore.save_codebook(bench.run_dir / "public" / "cells.npz", coarse, bench.model.digest)
    place = bench.run_dir / "public" / meta_k.NAMES["cells"]
    meta_k.save(place, meta, temperature, model=bench.model.digest, kind="cells")
    return Cells(coarse, temperature, meta)


def _count(config: PrivateConfig, filled: cells.Filled) -> release.Histogram:
    return release.histogram(*filled, max_buckets=config.max_buckets, unit="sentence")


def _counted(bench: experiment.Bench, config: PrivateConfig, coarse: Cells) -> list[release.Histogram]:
    """Every client's true counts."""
    clients = [[bench.examples[d][i] for d, i in share.members] for share in _shares(bench)]
    return [_count(config, cells.fill(bench.model, coarse.coarse, examples)) for examples in clients]


def _histograms(
    config: PrivateConfig,
    coarse: Cells,
    counted: Sequence[release.Histogram],
    made: release.ReleaseConfig | None,
) -> Shared:
    released = list(counted)
    if made is not None:
        released = [release.release(_noise_key(config, i), h, made) for i, h in enumerate(counted)]
    # One shape, whatever is dropped: a decoding program takes longer to compile than to run.
    rows = sum(len(h.counts) for h in counted)
    store = weighted_store(coarse.coarse, released, coarse.temperature, rows=rows)
    total = sum(len(h.counts) for h in released)
    return Shared(store, coarse.meta, coarse.temperature, total, BUCKET_BYTES)


def _noise_key(config: PrivateConfig, number: int) -> jax.Array:
    if config.insecure_noise_seed is not None:
        return jax.random.fold_in(keys.root(config.insecure_noise_seed), number)
    return entropy.key_from_words(entropy.secret_words())


def weighted_store(
    coarse: pq.Codebook, histograms: Sequence[release.Histogram], temperature: float, *, rows: int = 0
) -> retrieval.Weighted:
    """A searchable store of buckets, the heaviest first, padded to at least `rows`."""
    cells = np.concatenate([h.cells for h in histograms])
    values = np.concatenate([h.values for h in histograms])
    counts = np.concatenate([h.counts for h in histograms]).astype(np.float64)
    order = np.argsort(-counts, kind="stable")
    cells, values, counts = cells[order], values[order], counts[order]
    rows = max(rows, len(counts), 1)
    penalties = np.zeros(rows, np.float32)
    penalties[: len(counts)] = temperature * np.log(counts.max(initial=1) / counts)
    store = knn.build(pq.decode(coarse, jnp.asarray(cells)), jnp.asarray(values, jnp.int32))
    padded = knn.pad(store, rows)
    assert isinstance(padded, knn.Store)
    return retrieval.Weighted(padded, jnp.asarray(penalties))


def _cells(coarse: pq.Codebook, vectors: np.ndarray) -> np.ndarray:
    parts = [np.asarray(_encode(coarse, vectors[i : i + 65_536])) for i in range(0, len(vectors), 65_536)]
    return np.concatenate(parts) if parts else np.zeros((0, 1), np.uint8)


_encode = jax.jit(lambda coarse, vectors: pq.encode(coarse, jnp.asarray(vectors)))


def _spread(coarse: pq.Codebook, vectors: np.ndarray) -> float:
    """A kernel's temperature for centroids: how much farther the second nearest is than the nearest, on average."""
    sample = jnp.asarray(vectors[:: max(1, len(vectors) // 2000)])
    near = np.sort(np.asarray(pq.tables(coarse, sample))[:, 0], -1)
    gap = float(np.mean(near[:, 1] - near[:, 0])) if near.shape[1] > 1 else 1.0
    return max(gap, 1e-6)


def _mean(row: dict[str, Any], domains: Sequence[str]) -> float:
    return float(np.mean([row["bleu"][d] for d in domains]))


def _table(rows, said: Sequence[dict[str, Any]], domains: Sequence[str]) -> str:
    names = [corpora.GENERAL, *domains]
    head = ["shared", "epsilon", "records", *names, "clients' mean"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        epsilon = "none" if row["epsilon"] is None else f"{row['epsilon']:g}"
        scores = [f"{row['bleu'][n]:.2f}" for n in names]
        cells = [row["way"], epsilon, f"{row['count']:,}", *scores, f"{_mean(row, domains):.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    notes = [f"- {data['sentence']} ({data['notes'][0]})" for data in said]
    return "\n".join([*lines, "", *notes, f"- {release.no_statement().sentence}"]) + "\n"


def _picture(rows, domains: Sequence[str], path: pathlib.Path) -> None:
    made, (axis,) = plots.figure()
    noisy = sorted((r for r in rows if r["epsilon"] is not None), key=lambda r: r["epsilon"])
    x = [r["epsilon"] for r in noisy]
    series = {d: (x, [r["bleu"][d] for r in noisy]) for d in domains} if noisy else {}
    if noisy:
        series["mean"] = (x, [_mean(r, domains) for r in noisy])
    plots.curves(
        axis,
        series,
        xlabel="epsilon of a sentence pair",
        ylabel="BLEU",
        lines={f"mean, {r['way']}": _mean(r, domains) for r in rows if r["epsilon"] is None},
        title="Translation with noisy histograms of private text",
        log_x=bool(noisy),
    )
    plots.save(made, path)
