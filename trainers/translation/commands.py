"""The commands beside `train`: translation with a memory here, the roles and the measurements in their own modules."""

from __future__ import annotations

import math
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from jaxpriv import pq
from trainers.common import files, pairs, parallel_text, progress
from trainers.common.errors import InputError
from trainers.common.wording import counted
from trainers.translation import checks, data, datastore, decode, memory, meta_k, release, retrieval, session
from trainers.translation.config import MAX_BEAMS, MAX_K, check_length_penalty
from trainers.translation.leakage import AttackConfig, run_attack
from trainers.translation.private_memory import PrivateConfig, run_release, weighted_store
from trainers.translation.roles import (
    KeygenConfig,
    OpenConfig,
    ShareConfig,
    ShuffleConfig,
    run_keygen,
    run_open,
    run_share,
    run_shuffle,
)
from trainers.translation.store_command import StoreConfig, run_store
from trainers.translation.transfer import TransferConfig, run_transfer

__all__ = [
    "run_attack",
    "run_keygen",
    "run_open",
    "run_release",
    "run_share",
    "run_shuffle",
    "run_store",
    "run_transfer",
]
Result = tuple[dict[str, Any], str]


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Complete and print the comparison of a run folder."""

    run_dir: str = "runs/translation"
    """Folder that `train` wrote."""
    json: bool = False
    """Print one JSON object as the last line."""


def run_evaluate(config: EvaluateConfig) -> Result:
    return session.evaluate(config.run_dir)


@dataclass(frozen=True, kw_only=True)
class TranslateConfig:
    """Translate lines of text: line n of the output answers line n, blank lines stay blank."""

    model: str = "runs/translation/public"
    """Folder of the public model."""
    input: str = ""
    """File of lines to translate (UTF-8); without it lines are read from standard input and answered as they come."""
    output: str | None = None
    """File for the translations; without it they are printed, one line for each."""
    store: str | None = None
    """A memory to ask (folder of `store` or `open`)."""
    meta: str | None = None
    """The Meta-k network, with --store and --mixing adaptive; unless given, the one beside --model: meta_k.npz, for a
    memory of noisy counts cells_meta_k.npz."""
    mixing: Literal["adaptive", "fixed"] = "adaptive"
    """Let the network weigh the memory, or use --weight."""
    weight: float = 0.5
    """Weight of the memory with --mixing fixed (0 to 1)."""
    temperature: float = 10.0
    """Of the neighbours' kernel with --mixing fixed; squared distance that costs a factor e."""
    k: int = 8
    """Neighbours a step with --mixing fixed (adaptive: as the network was trained); at most 1024, and all there are."""
    gate: float = 1.0
    """The memory is asked only where the model's best piece has a probability below this."""
    search: Literal["exact", "inverted", "shadow", "faiss"] = "inverted"
    """How the memory is searched: every record; the blocks of records nearest to the query; every record in few
    components, the nearest ones exactly; or the nearest cells of FAISS's inverted file (needs faiss-cpu)."""
    shadow: int = 32
    """Components of the first pass with --search shadow; keys of no more numbers are searched exactly."""
    beams: int = 1
    """Beam width; 1 is greedy."""
    length_penalty: float = 1.0
    """Exponent of the length in a hypothesis' score (beam search), from -5 to 5."""
    json: bool = False
    """Print one JSON object as the last line."""


def run_translate(config: TranslateConfig) -> Result:
    """Translates a file or standard input; returns counts and speed."""
    _check(config)
    if config.output is not None:
        files.require_new(config.output, "--output")
    if config.input:
        source, parts = config.input, iter([parallel_text.read_lines(config.input)])
    else:
        source, parts = "standard input", _arriving()
    model = data.load(config.model)
    notes: list[str] = []
    stepper, weights = _way(config, model, notes)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    shown = config.output is None and not config.json
    if shown and sys.stdout is None:
        raise InputError("standard output is closed; give --output FILE")
    told: list[str] = []
    lines, pieces, empty, seconds = 0, 0, 0, 0.0
    for part in parts:
        texts = [pairs.clean(line) for line in part]  # as the model was trained
        sources = model.vocabulary.encode(texts)
        decode.check_lengths(sources, f"{source}, line", first=lines + 1)
        total = sum(len(s) > 0 for s in sources) if config.input else 0  # of standard input nobody knows
        start = time.process_time()
        with progress.bar(total=total, what="translating", unit="line") as bar:
            found = decode.search(
                stepper,
                weights,
                sources,
                beams=config.beams,
                length_penalty=config.length_penalty,
                progress=bar.update,
            )
        seconds += time.process_time() - start
        answers = model.vocabulary.decode(h.pieces for h in found)
        if shown:
            sys.stdout.writelines(answer + "\n" for answer in answers)
            sys.stdout.flush()
        else:
            told += answers
        lines += len(part)
        pieces += sum(len(h.pieces) + 1 for h in found)
        empty += sum(len(s) > 0 and not answer.strip() for s, answer in zip(sources, answers))
    if empty:
        few = "one that is hardly trained often does"
        print(f"note: for {counted(empty, 'line')} of text the model says nothing: {few}", file=sys.stderr)
    result = {"lines": lines, "pieces": pieces, "pieces_per_cpu_second": pieces / max(seconds, 1e-9)}
    result |= {"empty": empty}
    if config.output is not None:
        with files.atomic_write(config.output) as file:
            file.writelines(text + "\n" for text in told)
        return {**result, "output": config.output}, f"{lines} lines translated to {config.output}"
    return {**result, "translations": told}, ""


def _check(config: TranslateConfig) -> None:
    if not 1 <= config.beams <= MAX_BEAMS:
        raise InputError(f"--beams must be at least 1 and at most {MAX_BEAMS}, got {config.beams}")
    if config.k < 1:
        raise InputError(f"--k must be at least 1, got {config.k}")
    check_length_penalty(config.length_penalty)
    if not 0 < config.gate <= 1:
        raise InputError(f"--gate must be in (0, 1], got {config.gate}")
    if not 0 <= config.weight <= 1:
        raise InputError(f"--weight must be in [0, 1], got {config.weight}")
    if not 0 < config.temperature < math.inf:
        raise InputError(f"--temperature must be positive and finite, got {config.temperature}")
    if config.store is not None and config.search == "shadow" and config.shadow < 1:
        raise InputError(f"--shadow must be at least 1, got {config.shadow}")
    checks.check_search(config.search)


def _arriving() -> Iterator[list[str]]:
    """Lines of standard input, as many at a time as are there: a person's one by one, a file's in batches."""
    try:
        number = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or replaced by something that is no file
        raise InputError("--input FILE is needed: the lines to translate") from None
    if os.isatty(number):
        print("a line of text and Enter; Ctrl-D ends", file=sys.stderr)
    return _lines(number)


def _lines(number: int) -> Iterator[list[str]]:
    count, rest, more = 0, b"", True
    while more:
        data = os.read(number, 2**16)
        more = bool(data)
        *whole, rest = (rest + data).split(b"\n")
        whole += [] if more or not rest else [rest]
        lines = []
        for raw in whole:
            count += 1
            raw = (
                raw.removesuffix(b"\r")
                if count > 1
                else raw.removesuffix(b"\r").removeprefix(b"\xef\xbb\xbf")
            )
            try:
                lines.append(raw.decode("utf-8"))
            except UnicodeDecodeError as error:
                yield lines
                raise InputError(
                    f"standard input, line {count}: not UTF-8 (byte 0x{raw[error.start]:02x} at {error.start + 1})"
                ) from error
        if lines:
            yield lines


def _way(config: TranslateConfig, model: data.Model, notes: list[str]) -> tuple[decode.Stepper, Any]:
    if config.store is None:
        return decode.plain(model.graphdef), model.params
    opened = datastore.open_store(config.store, model=model.digest)
    if not opened.count:
        raise InputError(f"{config.store} holds no record; translate without --store")
    k, heat, meta, weight = min(config.k, opened.count, MAX_K), config.temperature, None, None
    if config.mixing == "adaptive":
        kind: meta_k.Kind = "records" if opened.weights is None else "cells"
        place = config.meta or pathlib.Path(config.model) / meta_k.NAMES[kind]
        meta, heat = meta_k.load(place, model=model.digest, kind=kind, notes=notes)
        k = meta.hidden_weights.shape[0] // 2
    else:
        weight = jnp.float32(config.weight)
    if opened.weights is not None:
        if not isinstance(opened.codebook, pq.Codebook):
            raise InputError(f"{config.store} has weights but no cells; write it with store --epsilon")
        shown = release.Histogram(opened.keys, opened.values, opened.weights)
        store: Any = weighted_store(opened.codebook, [shown], heat)
    else:
        # A shadow as wide as the keys would save nothing.
        search = "exact" if config.search == "shadow" and config.shadow >= opened.facts.dim else config.search
        store = memory.searchable(opened, search, components=config.shadow)
    how = retrieval.Retrieval(k=k, mixing=config.mixing, gate=config.gate, candidates=max(64, k))
    weights = retrieval.Weights(model.params, store, jnp.float32(heat), meta=meta, weight=weight)
    return retrieval.stepper(model.graphdef, how), weights


CONFIGS = {
    "evaluate": EvaluateConfig,
    "translate": TranslateConfig,
    "keygen": KeygenConfig,
    "store": StoreConfig,
    "share": ShareConfig,
    "shuffle": ShuffleConfig,
    "open": OpenConfig,
    "attack": AttackConfig,
    "release": PrivateConfig,
    "transfer": TransferConfig,
}
