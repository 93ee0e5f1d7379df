"""What a shared memory gives away: reconstruction, membership, rare values. Measured, not promised.

Reconstruction is the paper's attack: one member trains an inverse model on its own (key or code -> text) pairs and
turns it on the others' records. Membership is easier: model and codebook are shared and deterministic, so whoever
guesses a sentence pair can encode it and look for its exact codes. Towards other members the epsilon of all this is
none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key

from jaxpriv import knn
from trainers.translation import scoring

PAD = 0  # as in `model`: no target holds it


class Inverse(NamedTuple):
    """The inverse model: a hidden layer, one code a position, the pieces' scores.

    mean, scale: of the keys it was fitted on.
    """

    mean: Float[Array, " dim"]
    scale: Float[Array, ""]
    hidden: Float[Array, "dim hidden"]
    hidden_bias: Float[Array, " hidden"]
    positions: Float[Array, "hidden length code"]
    pieces: Float[Array, "code vocabulary"]
    pieces_bias: Float[Array, "length vocabulary"]


class Reconstruction(NamedTuple):
    """How much hidden text came back, in percent, over the pieces that a record does not state itself.

    bleu: of the windows as text. precision, recall, f1: of their pieces, as multisets. baseline_f1: of one who knows no
    key and always answers with the most frequent pieces; what the attack adds is above it. samples: (truth, guess).
    """

    bleu: float
    precision: float
    recall: float
    f1: float
    baseline_f1: float
    samples: tuple[tuple[str, str], ...]


class Membership(NamedTuple):
    """What a guesser learns who encodes sentence pairs and looks for their codes.

    members_found, others_found: percent of guessed sentences with every record in the memory, to the last code.
    auc: of the mean distance of a sentence's records to the nearest stored key; 1 is certainty, 0.5 a coin.
    """

    members_found: float
    others_found: float
    auc: float


def windows(values: np.ndarray, sentences: np.ndarray, *, length: int) -> np.ndarray:
    """The `length` target pieces before each record's own, PAD where the sentence had not begun: int32 [n, length].

    Records of a sentence must stand together and in order, as `retrieval.entries` yields them.
    """
    out = np.full((len(values), length), PAD, np.int32)
    for back in range(1, length + 1):
        same = np.zeros(len(values), bool)
        same[back:] = sentences[back:] == sentences[:-back]
        out[same, length - back] = values[:-back][same[back:]]
    return out


def fit_inverse(
    key: Key[Array, ""],
    keys: np.ndarray,
    texts: np.ndarray,
    *,
    vocabulary_size: int,
    hidden: int = 512,
    code: int = 128,
    steps: int = 1_000,
    batch_size: int = 128,
    learning_rate: float = 2e-3,
) -> Inverse:
    """Trains the attacker's model: from a key (for codes: the decoded key) to the pieces before it.

    Args:
      keys: float [n, dim], the attacker's own. texts: int [n, length], PAD where there is nothing.
    """
    if len(keys) == 0 or len(keys) != len(texts):
        raise ValueError(
            f"the attacker needs records of its own, one text a key, got {len(keys)} and {len(texts)}"
        )
    first, second, third, order = jax.random.split(key, 4)
    xavier = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "normal")
    dim, length = keys.shape[1], texts.shape[1]
    model = Inverse(
        mean=jnp.asarray(keys.mean(0)),
        scale=jnp.asarray(max(float(keys.std()), 1e-12), jnp.float32),
        hidden=xavier(first, (dim, hidden)),
        hidden_bias=jnp.zeros(hidden),
        positions=xavier(second, (hidden, length * code)).reshape(hidden, length, code),
        pieces=xavier(third, (code, vocabulary_size)),
        pieces_bias=jnp.zeros((length, vocabulary_size)),
    )
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))
    fixed = {"mean": model.mean, "scale": model.scale}

    def loss(model, fixed, keys, texts):
        log_probs = jax.nn.log_softmax(_scores(model._replace(**fixed), keys))
        return -jnp.take_along_axis(log_probs, texts[..., None], -1).mean()

    @jax.jit
    def step(model, state, fixed, data, labels, number):
        index = jax.random.randint(jax.random.fold_in(order, number), (batch_size,), 0, len(keys))
        gradient = jax.grad(loss)(model, fixed, data[index], labels[index])
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(model, updates), state

    data, labels = jnp.asarray(keys, jnp.float32), jnp.asarray(texts, jnp.int32)
    state = optimizer.init(model)
    for number in range(steps):
        model, state = step(model, state, fixed, data, labels, number)
    return model._replace(**fixed)


def _scores(model: Inverse, keys: Float[Array, "n dim"]) -> Float[Array, "n length vocabulary"]:
    hidden = jax.nn.relu((keys - model.mean[None]) / model.scale @ model.hidden + model.hidden_bias[None])
    codes = jnp.einsum("nh,hlc->nlc", hidden, model.positions)
    return codes @ model.pieces + model.pieces_bias[None]


@jax.jit
def _best(model: Inverse, keys: Float[Array, "n dim"]) -> Int[Array, "n length"]:
    return jnp.argmax(_scores(model, keys), -1).astype(jnp.int32)


def invert(model: Inverse, keys: np.ndarray, *, batch_size: int = 512) -> np.ndarray:
    """The attacker's guess at the pieces before each record: int32 [n, length]."""
    out = np.zeros((len(keys), model.positions.shape[1]), np.int32)
    for start in range(0, len(keys), batch_size):
        part = np.zeros((batch_size, keys.shape[1]), np.float32)
        rows = keys[start : start + batch_size]
        part[: len(rows)] = rows
        out[start : start + batch_size] = np.asarray(_best(model, part))[: len(rows)]
    return out


def reconstruct(
    model: Inverse,
    keys: np.ndarray,
    texts: np.ndarray,
    own_texts: np.ndarray,
    decode: Callable[[Sequence[np.ndarray]], list[str]],
    *,
    samples: int = 5,
) -> Reconstruction:
    """Tries an inverse model on other members' records.

    Args:
      keys, texts: the victims' keys (or decoded codes) and the truth, records without any hidden piece left out.
      own_texts: the attacker's, from which the baseline takes its most frequent pieces.
      decode: pieces to text (`Vocabulary.decode`).
    """
    some = (texts != PAD).any(-1)
    keys, texts = keys[some], texts[some]
    if not len(keys):
        raise ValueError("no record with hidden text to reconstruct: give longer sentences")
    guesses = invert(model, keys)
    precision, recall, f1 = overlap(guesses, texts)
    counts = np.bincount(own_texts[own_texts != PAD].ravel(), minlength=1)
    usual = np.argsort(-counts, kind="stable")[: texts.shape[1]]
    blind = np.full(texts.shape, PAD, np.int32)
    blind[:, : len(usual)] = usual
    told, truth = decode([g[g != PAD] for g in guesses]), decode([t[t != PAD] for t in texts])
    shown = np.linspace(0, len(texts) - 1, min(samples, len(texts))).astype(int)
    return Reconstruction(
        bleu=scoring.score(told, truth).bleu,
        precision=precision,
        recall=recall,
        f1=f1,
        baseline_f1=overlap(blind, texts)[2],
        samples=tuple((truth[i], told[i]) for i in shown),
    )


def overlap(guesses: np.ndarray, texts: np.ndarray) -> tuple[float, float, float]:
    """`(precision, recall, F1)` in percent of guessed pieces, rows as multisets, PAD left out."""
    hits = 0
    for guess, text in zip(guesses, texts):
        pieces, counts = np.unique(guess[guess != PAD], return_counts=True)
        hits += int(np.minimum(counts, (text[None] == pieces[:, None]).sum(1)).sum())
    guessed, there = int((guesses != PAD).sum()), int((texts != PAD).sum())
    precision, recall = hits / max(guessed, 1), hits / max(there, 1)
    f1 = 2 * hits / max(guessed + there, 1)
    return 100 * precision, 100 * recall, 100 * f1


def membership(
    memory_keys: np.ndarray,
    memory_values: np.ndarray,
    members: tuple[np.ndarray, np.ndarray, np.ndarray],
    others: tuple[np.ndarray, np.ndarray, np.ndarray],
    decode: Callable[[Array], Array],
) -> Membership:
    """Guesses sentences and looks for their records in a memory.

    Args:
      memory_keys, memory_values: stored keys (codes or floats) and values, as everyone who opened it holds them.
      members, others: `(keys, values, sentences)` of guessed sentence pairs, encoded like the memory's; the first
        really are in it, the others are not.
      decode: stored keys to representations, for distances.
    """
    stored = _rows(memory_keys, memory_values)
    store = knn.build(decode(jnp.asarray(memory_keys)), jnp.asarray(memory_values, jnp.int32))
    found, scores = [], []
    for keys, values, sentences in (members, others):
        if not len(values):
            raise ValueError(
                "membership needs at least one sentence that is in the memory and one that is not"
            )
        names, owner = np.unique(sentences, return_inverse=True)
        exact = np.isin(_rows(keys, values), stored)
        found.append(np.bincount(owner, ~exact, len(names)) == 0)
        distance = _nearest(store, np.asarray(decode(jnp.asarray(keys))))
        scores.append(np.bincount(owner, distance, len(names)) / np.bincount(owner))
    return Membership(100 * found[0].mean(), 100 * found[1].mean(), auc(-scores[0], -scores[1]))


_search_one = jax.jit(lambda store, queries: knn.search(store, queries, k=1).distances[:, 0])


def _nearest(store: knn.Store, queries: np.ndarray) -> np.ndarray:
    """Squared distance of every query to the nearest stored key."""
    out = np.zeros(len(queries))
    for start in range(0, len(queries), 256):
        part = np.zeros((256, queries.shape[1]), np.float32)
        rows = queries[start : start + 256]
        part[: len(rows)] = rows
        out[start : start + 256] = np.asarray(_search_one(store, part))[: len(rows)]
    return out


def _rows(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Every record as one opaque value, equal if and only if key and value are."""
    keys = np.ascontiguousarray(keys)
    width = keys.shape[1] * keys.itemsize
    rows = np.empty((len(keys), width + 4), np.uint8)
    rows[:, :width] = keys.view(np.uint8).reshape(len(keys), width)
    rows[:, width:] = np.ascontiguousarray(values, "<i4").view(np.uint8).reshape(-1, 4)
    return rows.view(f"V{width + 4}")[:, 0]


def auc(positives: np.ndarray, negatives: np.ndarray) -> float:
    """Probability that a positive scores above a negative; ties count half."""
    joined = np.concatenate([positives, negatives])
    _, index, counts = np.unique(joined, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[index]
    n, m = len(positives), len(negatives)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))


class RareValues(NamedTuple):
    """Values of a client that single out its text. in_one_sentence: distinct values that one sentence has, of all
    clients' text. in_no_other_client: that nobody else has. records: of the client, that carry one of the first.
    """

    in_one_sentence: int
    in_no_other_client: int
    records: int


def rare_values(clients: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[RareValues]:
    """Counts, for each client, values that occur in one sentence of all clients' text, or at no other client.

    Args:
      clients: `(values, sentences)` of each; sentence numbers are each client's own.
    """
    pairs, homes = [], []
    for values, sentences in clients:
        seen = np.unique(np.stack([np.asarray(values, np.int64), np.asarray(sentences, np.int64)]), axis=1)
        pairs.append(seen[0])
        homes.append(np.unique(seen[0]))
    size = 1 + max((int(p.max()) for p in pairs if len(p)), default=-1)
    sentences_with = sum((np.bincount(p, minlength=size) for p in pairs), np.zeros(size, np.int64))
    clients_with = sum((np.bincount(h, minlength=size) for h in homes), np.zeros(size, np.int64))
    return [
        RareValues(
            int((sentences_with[home] == 1).sum()),
            int((clients_with[home] == 1).sum()),
            int((sentences_with[np.asarray(values, np.int64)] == 1).sum()),
        )
        for home, (values, _) in zip(homes, clients)
    ]
