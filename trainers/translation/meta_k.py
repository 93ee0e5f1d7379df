"""Trains the Meta-k network of adaptive kNN-MT (Zheng et al. 2021, arXiv:2105.13022) with all else frozen.

By default on public held-out pairs and a public store; on private ones its weights would be a release that
nobody has accounted ("epsilon: none"). Neighbours and model probabilities do not change in training, so they
are computed once, and the loss needs the vocabulary only at the neighbours and the true piece.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxpriv import knn
from trainers.common import files
from trainers.common.errors import InputError
from trainers.translation import batches, data, retrieval
from trainers.translation import model as models


@dataclass(frozen=True, kw_only=True)
class MetaKConfig:
    """Training of the Meta-k network."""

    learning_rate: float = 3e-4
    """Adam's (0.9, 0.98), halved when the held-back loss has not improved for `patience` epochs."""
    smoothing: float = 0.001
    """Label smoothing over the vocabulary."""
    batch_sentences: int = 32
    """An update sees as many positions as this many sentences have on average."""
    max_updates: int = 5_000
    """Updates at most."""
    patience: int = 3
    """Epochs without a better loss before the rate is halved; training ends after three halvings in vain."""
    held_back: float = 0.2
    """Share of the sentences whose loss decides which weights are kept."""


class Positions(NamedTuple):
    """Target positions with the vocabulary cut to what the mixture can change: K neighbours and the truth.

    neighbors: the K nearest entries; their `values` are columns of `log_nmt`, equal for equal pieces.
    log_nmt: log p_NMT of the neighbours' pieces (a piece stands once, at its first neighbour; -1e9 elsewhere)
      and, in the last column, of the true piece unless a neighbour has it.
    target: column of the true piece.
    rest_sum, rest_count: sum of log p_NMT over all other pieces, and their number, for label smoothing.
    sentences: which pair a position is from.
    """

    neighbors: knn.Neighbors
    log_nmt: Float[Array, "positions columns"]
    target: Int[Array, " positions"]
    rest_sum: Float[Array, " positions"]
    rest_count: Float[Array, " positions"]
    sentences: Int[Array, " positions"]


@functools.partial(jax.jit, static_argnums=(0, 5))
def _look(graphdef, params, store, batch: batches.Batch, sentences, config: retrieval.Retrieval):
    keys, log_nmt = retrieval.teacher_forced(graphdef, params, batch)
    keys = keys.reshape(-1, keys.shape[-1])
    log_nmt = log_nmt.reshape(-1, log_nmt.shape[-1])
    truth = jnp.asarray(batch.targets).reshape(-1)
    found = retrieval.find(store, keys, config)
    values, real = found.values, found.ids >= 0
    same = (values[:, :, None] == values[:, None, :]) & real[:, None, :]
    column = jnp.argmax(same, -1)  # the first neighbour with this piece
    first = real & (column == jnp.arange(values.shape[1])[None])
    near = jnp.take_along_axis(log_nmt, values, 1)
    hit = real & (values == truth[:, None])
    is_hit = hit.any(-1)
    own = jnp.take_along_axis(log_nmt, truth[:, None], 1)[:, 0]
    local = jnp.concatenate([jnp.where(first, near, -1e9), jnp.where(is_hit, -1e9, own)[:, None]], 1)
    target = jnp.where(is_hit, jnp.argmax(hit, -1), values.shape[1])
    counted = local > -1e8
    possible = log_nmt.shape[1] - 2  # all but PAD and UNK
    total = jnp.where(log_nmt > -1e8, log_nmt, 0.0).sum(-1)
    rest_sum = total - jnp.where(counted, local, 0.0).sum(-1)
    rest_count = (possible - counted.sum(-1)).astype(jnp.float32)
    found = found._replace(values=jnp.where(real, column, 0).astype(jnp.int32))
    return Positions(found, local, target.astype(jnp.int32), rest_sum, rest_count, sentences)


def look(
    graphdef: nnx.GraphDef,
    params: Any,
    store: Any,
    examples: Sequence[batches.Example],
    *,
    config: retrieval.Retrieval,
    batch_tokens: int = 1024,
) -> Positions:
    """Teacher-forces held-out pairs and searches the store at every target position."""
    parts = []
    for index, batch in batches.in_order(examples, batch_tokens=batch_tokens):
        owners = np.full(batch.targets.shape[0], -1, np.int32)
        owners[: len(index)] = index
        flat = np.repeat(owners, batch.targets.shape[1])
        out = jax.device_get(_look(graphdef, params, store, batch, flat, config))
        real = (batch.targets != models.PAD).reshape(-1)
        parts.append(jax.tree.map(lambda leaf: leaf[real], out))  # noqa: B023 (used at once)
    if not parts:
        raise ValueError("no held-out pair to train the Meta-k network on: give at least one")
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def loss(
    meta: knn.MetaK, positions: Positions, temperature: Float[Array, ""], *, smoothing: float
) -> Float[Array, ""]:
    """Mean label-smoothed negative log-likelihood of the true pieces under the adaptive mixture, in nats."""
    choice = knn.meta_log_probs(meta, positions.neighbors)
    log_p = knn.adaptive(positions.log_nmt, positions.neighbors, choice, temperature=temperature)
    truth = jnp.take_along_axis(log_p, positions.target[:, None], 1)[:, 0]
    counted = positions.log_nmt > -1e8
    total = jnp.where(counted, log_p, 0.0).sum(-1) + positions.rest_sum + positions.rest_count * choice[:, 0]
    pieces = positions.rest_count + counted.sum(-1)
    return -((1 - smoothing) * truth + smoothing * total / pieces).mean()


def _take(positions: Positions, index: np.ndarray) -> Positions:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[index]), positions)


def fit(
    key: Key[Array, ""],
    positions: Positions,
    *,
    temperature: float,
    config: MetaKConfig = MetaKConfig(),
) -> tuple[knn.MetaK, float]:
    """A trained network, and its loss on the held-back sentences. The same key gives the same network."""
    init_key, split_key = jax.random.split(key)
    seed = np.asarray(jax.random.key_data(split_key)).tolist()
    rng = np.random.default_rng(seed)
    names = np.unique(positions.sentences)
    if len(names) < 2:
        raise ValueError(f"the Meta-k network needs at least 2 held-out pairs, got {len(names)}")
    kept_back = rng.choice(names, max(1, round(config.held_back * len(names))), replace=False)
    back = np.isin(positions.sentences, kept_back)
    valid, train = _take(positions, np.flatnonzero(back)), np.flatnonzero(~back)
    size = max(1, round(len(positions.sentences) / len(names) * config.batch_sentences))
    size = min(size, len(train))

    meta = knn.init_meta(init_key, k=positions.neighbors.distances.shape[-1])
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=config.learning_rate, b1=0.9, b2=0.98)
    opt = optimizer.init(meta)
    heat = jnp.float32(temperature)
    pool = jax.tree.map(jnp.asarray, positions)

    # Positions may be private: arguments, not constants of programs that the compilation cache keeps.
    @jax.jit
    def epoch(pool, heat, meta, opt, order):
        def update(carry, index):
            meta, opt = carry
            rows = jax.tree.map(lambda leaf: leaf[index], pool)
            grads = jax.grad(loss)(meta, rows, heat, smoothing=config.smoothing)
            updates, opt = optimizer.update(grads, opt, meta)
            return (optax.apply_updates(meta, updates), opt), None

        return jax.lax.scan(update, (meta, opt), order)[0]

    evaluate = jax.jit(lambda meta, valid, heat: loss(meta, valid, heat, smoothing=config.smoothing))
    best, best_loss, bad, halvings, updates = meta, float(evaluate(meta, valid, heat)), 0, 0, 0
    steps = len(train) // size
    while updates < config.max_updates and halvings < 3:
        order = rng.permutation(train)[: steps * size].reshape(steps, size)
        meta, opt = epoch(pool, heat, meta, opt, jnp.asarray(order))
        updates += steps
        now = float(evaluate(meta, valid, heat))
        if now < best_loss:
            best, best_loss, bad = meta, now, 0
        else:
            bad += 1
            if bad == config.patience:
                bad, halvings = 0, halvings + 1
                rate = opt.hyperparams["learning_rate"] / 2
                opt = opt._replace(hyperparams={**opt.hyperparams, "learning_rate": rate})
    return best, best_loss


def fixed_loss(positions: Positions, *, temperature, weight) -> Float[Array, ""]:
    """Mean negative log-likelihood of the true pieces under a fixed mixing weight, in nats."""
    columns = positions.log_nmt.shape[-1]
    log_knn = knn.to_log_probs(positions.neighbors, vocab_size=columns, temperature=temperature)
    log_p = knn.interpolate(positions.log_nmt, log_knn, weight=weight)
    return -jnp.take_along_axis(log_p, positions.target[:, None], 1).mean()


def temperatures(positions: Positions) -> tuple[float, ...]:
    """A grid around the scale of the distances at hand: multiples of the median gap of nearest and
    farthest.
    """
    d = np.asarray(positions.neighbors.distances)
    d = d[np.isfinite(d).all(-1)]
    scale = float(np.median(d[:, -1])) if len(d) else 1.0
    return tuple(scale * m for m in (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)) if scale > 0 else (1.0,)


def tune_fixed(positions: Positions) -> tuple[float, float]:
    """The `(temperature, weight)` of a fixed mixture with the best likelihood on these positions, from a
    grid.
    """
    rows = jax.tree.map(jnp.asarray, positions)
    score = jax.jit(lambda rows, t, w: fixed_loss(rows, temperature=t, weight=w))
    grid = [(t, w) for t in temperatures(positions) for w in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)]
    return min(grid, key=lambda g: float(score(rows, jnp.float32(g[0]), jnp.float32(g[1]))))


def fit_with_temperature(
    key: Key[Array, ""],
    positions: Positions,
    *,
    config: MetaKConfig = MetaKConfig(),
) -> tuple[knn.MetaK, float, float]:
    """`(network, temperature, held-back loss)`: one network a temperature, the best kept.

    All start from the same weights and hold the same sentences back, so that their losses compare.
    """
    tries = []
    for t in temperatures(positions)[::2]:
        tries.append((t, *fit(jax.random.clone(key), positions, temperature=t, config=config)))
    temperature, meta, value = min(tries, key=lambda t: t[2])
    return meta, temperature, value


Kind = Literal["records", "cells"]
"""What a network was trained on and is for: single records, or cells with counts."""


def save(path: files.PathLike, meta: knn.MetaK, temperature: float, *, model: str, kind: Kind) -> None:
    """Writes a Meta-k network, its temperature, and the digest of the model and the kind of memory it is for."""
    facts = {"temperature": np.float32(temperature), "model": np.asarray(model), "kind": np.asarray(kind)}
    data.save_params(path, {**meta._asdict(), **facts})


def load(path: files.PathLike, *, model: str, kind: Kind, notes: list[str]) -> tuple[knn.MetaK, float]:
    """Reads what `save` wrote, for this model and kind of memory; says in `notes` where the file names none.

    Raises:
      InputError: it is damaged, or for another model or kind.
    """
    arrays = data.load_arrays(files.existing_file(path, "Meta-k network"))
    arrays = {name.removeprefix("['").removesuffix("']"): array for name, array in arrays.items()}
    if not {*knn.MetaK._fields, "temperature"} <= arrays.keys() <= {*knn.MetaK._fields, *_FACTS}:
        raise InputError(f"{path} is not a Meta-k network; `jaxpriv translation train` writes one")
    if not _is_network(arrays):
        raise InputError(
            f"{path} is a damaged Meta-k network: shapes do not fit together, or numbers are not finite; copy it anew"
        )
    if "model" not in arrays or "kind" not in arrays:
        notes.append(f"{path} does not say which model and memory it is for; taken to be these")
    elif str(arrays["model"]) != model:
        raise InputError(
            f"{path} is for the model {str(arrays['model'])[:12]}, not for {model[:12]}; "
            "give the network beside the model"
        )
    elif str(arrays["kind"]) != kind:
        raise InputError(
            f"{path} is for memories of {arrays['kind']}, this one holds {kind}; give public/{NAMES[kind]} of the run"
        )
    meta = knn.MetaK(**{name: jnp.asarray(arrays[name]) for name in knn.MetaK._fields})
    return meta, float(arrays["temperature"])


NAMES: dict[Kind, str] = {"records": "meta_k.npz", "cells": "cells_meta_k.npz"}
"""The networks' files beside a run's public model."""
_FACTS = ("temperature", "model", "kind")


def _is_network(arrays: dict[str, np.ndarray]) -> bool:
    numbers = {name: arrays[name] for name in (*knn.MetaK._fields, "temperature")}
    if any(a.dtype.kind != "f" or not np.isfinite(a).all() for a in numbers.values()):
        return False
    first = numbers["hidden_weights"]
    if first.ndim != 2 or first.shape[0] < 2 or first.shape[0] % 2 or not first.shape[1]:
        return False
    hidden, choices = first.shape[1], knn.num_choices(first.shape[0] // 2)
    wanted = {
        "hidden_bias": (hidden,),
        "out_weights": (hidden, choices),
        "out_bias": (choices,),
        "temperature": (),
    }
    fits = all(numbers[name].shape == shape for name, shape in wanted.items())
    return fits and float(numbers["temperature"]) > 0
