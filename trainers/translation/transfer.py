"""`jaxpriv translation transfer`: the Meta-k network trained in one domain and used in the others.

In a finished run, with the joint memory: one network from public held-out pairs (the default, which no private text
touches) and one from each client's validation pairs, which a client would have to release with no guarantee.
"""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxpriv import keys
from trainers.common import files, metrics
from trainers.translation import corpora, experiment, meta_k, retrieval, session

RESULTS = "transfer.jsonl"


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Measure how a Meta-k network trained in one domain serves the others, in a finished run."""

    run_dir: str = "runs/translation"
    """Folder that `train` wrote; results are added to it."""
    json: bool = False
    """Print one JSON object as the last line."""


def run_transfer(config: TransferConfig) -> tuple[dict[str, Any], str]:
    """Scores every network that the run folder does not hold yet; BLEU by training domain and test domain."""
    run, read = session.reopen(config.run_dir)
    bench = experiment.Bench(run, read, pathlib.Path(config.run_dir))
    bench.prepare()
    made = files.digest_of(bench.model.digest, corpora.digest(read), repr((run.k, run.key_encryption)))[:20]
    place = bench.run_dir / RESULTS
    known = {"made": str, "trained_on": str, "bleu": dict[str, float]}
    everywhere = [corpora.GENERAL, *bench.domains]
    # One that lacks a domain is measured anew.
    rows = [
        r
        for r in (metrics.read(place, known) if place.exists() else [])
        if r["made"] == made and r["bleu"].keys() >= set(everywhere)
    ]
    have = {r["trained_on"] for r in rows}
    stepper = retrieval.stepper(bench.graphdef, bench.retrieval())
    store = None
    with metrics.Writer(place) as writer:
        for domain in everywhere:
            if domain in have:
                continue
            if store is None:
                store = bench.store([bench.memory(d) for d in bench.domains])
            weights = _weights(bench, store, domain)
            ways: experiment.Ways = dict.fromkeys(everywhere, (stepper, weights))
            bleu, _, _ = bench.judge(f"network of {domain}", ways)
            rows.append({"made": made, "trained_on": domain, "bleu": bleu})
            writer.write(**rows[-1])
    text = _table(rows, everywhere)
    with files.atomic_write(bench.run_dir / "transfer.md") as file:
        file.write(text)
    result = {"run_dir": config.run_dir, "bleu": {r["trained_on"]: r["bleu"] for r in rows}}
    return {**result, "guarantee": GUARANTEE}, text


GUARANTEE = "epsilon: none (a network trained on private pairs is a release that nothing accounts for)"


def _weights(bench: experiment.Bench, store: Any, domain: str) -> retrieval.Weights:
    if domain == corpora.GENERAL:  # the run's own, from public held-out pairs and a public memory
        return bench.weights(store)
    pairs = bench.read.clients[domain].validation
    examples = bench.model.vocabulary.examples(pairs)
    found = meta_k.look(bench.graphdef, bench.params, store, examples, config=bench.retrieval())
    key = keys.stream(keys.root(bench.config.seed), f"translation-meta-{domain}")
    meta, temperature, _ = meta_k.fit_with_temperature(key, found)
    return retrieval.Weights(bench.params, store, jnp.float32(temperature), meta=meta)


def _table(rows: list[dict[str, Any]], domains: list[str]) -> str:
    lines = ["| network trained on | " + " | ".join(domains) + " |", "|" + " --- |" * (len(domains) + 1)]
    for row in rows:
        name = "public pairs" if row["trained_on"] == corpora.GENERAL else row["trained_on"]
        lines.append(f"| {name} | " + " | ".join(f"{row['bleu'][d]:.2f}" for d in domains) + " |")
    return "\n".join([*lines, "", f"BLEU. Networks of clients: {GUARANTEE}."]) + "\n"
