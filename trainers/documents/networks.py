"""The small networks: a classifier of embeddings, and the recoder that spreads topics apart.

Both train on public documents alone. The number of epochs, at most 20, is the one that did best on the
validation documents (Meehan, Mrini, Chaudhuri 2022, appendix A.3).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxpriv import keys
from trainers.documents.data import Encoded

EPOCHS = 20
PATIENCE = 5


class MLP(nnx.Module):
    """One hidden layer with GELU."""

    def __init__(self, size_in: int, hidden: int, size_out: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(size_in, hidden, rngs=rngs)
        self.second = nnx.Linear(hidden, size_out, rngs=rngs)

    def __call__(self, x: Float[Array, "*batch size_in"]) -> Float[Array, "*batch size_out"]:
        return self.second(jax.nn.gelu(self.first(x)))


class Classifier(NamedTuple):
    """A trained MLP and the scaling of its inputs. `predict` gives classes, `logits` their scores."""

    graph: nnx.GraphDef
    state: nnx.State
    centre: np.ndarray
    scale: float

    def logits(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(_logits(self.graph, self.state, (x - self.centre) / self.scale))

    def votes(self, x: np.ndarray) -> np.ndarray:
        """Logistic scores in [0, 1], float32 [rows, classes]; each row is a function of its own input."""
        return _in_blocks(lambda part: jax.nn.sigmoid(self.logits(part)), x)

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.logits(x).argmax(1).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph, state, x):
    return nnx.merge(graph, state)(x)


def macro_f1(truth: np.ndarray, predicted: np.ndarray, num_classes: int) -> float:
    """Mean over classes of F1, in percent; a class never predicted counts as 0.

    >>> macro_f1(np.array([0, 0, 1]), np.array([0, 0, 0]), 2)
    40.0
    """
    scores = []
    for c in range(num_classes):
        hits = np.sum((truth == c) & (predicted == c))
        scores.append(2 * hits / max(np.sum(truth == c) + np.sum(predicted == c), 1))
    return round(100 * float(np.mean(scores)), 10)


def random_guess(labels: np.ndarray, num_classes: int) -> float:
    """Percent right of a guesser who draws classes by their share: 100 * sum of squared shares (the paper's).

    >>> random_guess(np.array([0] * 9 + [1]), 2)
    82.0
    """
    shares = np.bincount(labels[labels >= 0], minlength=num_classes) / max(np.sum(labels >= 0), 1)
    return round(100 * float(shares @ shares), 10)


def train_classifier(
    key: Key[Array, ""],
    inputs: np.ndarray,
    labels: np.ndarray,
    validation: tuple[np.ndarray, np.ndarray],
    num_classes: int,
    *,
    hidden: int = 256,
    batch_size: int = 128,
) -> Classifier:
    """Trains by Adam on cross-entropy; the epoch with the best macro-F1 on `validation` is kept.

    Training ends early when PATIENCE epochs have brought nothing better.
    """
    known = labels >= 0
    centre = inputs.mean(0)
    scale = float(np.sqrt(((inputs - centre) ** 2).mean()) + 1e-12)
    x, y = jnp.asarray((inputs[known] - centre) / scale), jnp.asarray(labels[known])
    graph, state = nnx.split(MLP(inputs.shape[1], hidden, num_classes, nnx.Rngs(keys.stream(key, "initial"))))
    size = min(batch_size, len(y))
    moments, best, kept, best_number = _ADAM.init(state), -1.0, state, 0
    for number in range(EPOCHS):
        if number - best_number > PATIENCE:
            break
        order = jax.random.permutation(keys.for_round(keys.stream(key, "order"), number), len(y))
        order = order[: len(y) // size * size].reshape(-1, size)
        state, moments = _classifier_epoch(graph, state, moments, x, y, order)
        now = Classifier(graph, state, centre, scale)
        score = macro_f1(validation[1], now.predict(validation[0]), num_classes)
        if score > best:
            best, kept, best_number = score, state, number
    return Classifier(graph, kept, centre, scale)


_ADAM = optax.adamw(1e-3, weight_decay=1e-4)


@functools.partial(jax.jit, static_argnums=0)
def _classifier_epoch(graph, state, moments, x, y, order):
    def step(carry, rows):
        state, moments = carry

        def loss(state):
            logits = nnx.merge(graph, state)(x[rows])
            return optax.softmax_cross_entropy_with_integer_labels(logits, y[rows]).mean()

        updates, moments = _ADAM.update(jax.grad(loss)(state), moments, state)
        return (optax.apply_updates(state, updates), moments), None

    return jax.lax.scan(step, (state, moments), order)[0]


class Recoder(NamedTuple):
    """The sentence map H: an MLP back to the embedding's size."""

    graph: nnx.GraphDef
    state: nnx.State

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """Maps sentences [n, dim]; each row is a function of its own input alone."""
        return _in_blocks(lambda part: _logits(self.graph, self.state, part), vectors)


def _in_blocks(function: Callable, rows: np.ndarray, *, block: int = 4096) -> np.ndarray:
    """A row-wise function in batches of one fixed shape, so that rows cannot move each other's rounding."""
    parts = []
    for start in range(0, max(len(rows), 1), block):
        part = rows[start : start + block]
        padded = np.zeros((block, rows.shape[1]), np.float32)
        padded[: len(part)] = part
        parts.append(np.asarray(function(padded))[: len(part)])
    return np.concatenate(parts)


def train_recoder(
    key: Key[Array, ""],
    train: Encoded,
    clusters: np.ndarray,
    *,
    num_clusters: int,
    hidden: int = 768,
    learning_rate: float = 1e-3,
    batch_size: int = 64,
    max_sentences: int = 8,
):
    """Yields H after each epoch: sentences through H, averaged, through a linear head to the document's cluster.

    Args:
      clusters: each document's k-means cluster, the target of the cross-entropy.
      max_sentences: at most so many sentences a document in one epoch, drawn anew each time.
    """
    dim = train.vectors.shape[1]
    rngs = nnx.Rngs(keys.stream(key, "initial"))
    graph, state = nnx.split((MLP(dim, hidden, dim, rngs), nnx.Linear(dim, num_clusters, rngs=rngs)))
    optimizer = optax.adam(learning_rate)
    moments = optimizer.init(state)
    vectors, targets = jnp.asarray(train.vectors), jnp.asarray(clusters)

    def loss(state, row, place, mask):
        recode, head = nnx.merge(graph, state)
        mapped = jnp.where(mask[..., None], recode(vectors[place]), 0).sum(1)
        logits = head(mapped / jnp.maximum(mask.sum(1, keepdims=True), 1))
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets[row]).mean()

    epoch = _make_epoch(optimizer, loss)
    for number in range(EPOCHS):
        rows, places, where = _epoch_batches(
            keys.for_round(keys.stream(key, "order"), number), train, batch_size, max_sentences
        )
        state, moments = epoch(state, moments, rows, places, where)
        yield Recoder(*nnx.split(nnx.merge(graph, state)[0]))


def _make_epoch(optimizer: optax.GradientTransformation, loss: Callable) -> Callable:
    """The jitted `(state, moments, *batches of an epoch) -> (state, moments)`; `loss(state, row, place, mask)`."""

    def step(carry, batch):
        state, moments = carry
        updates, moments = optimizer.update(jax.grad(loss)(state, *batch), moments, state)
        return (optax.apply_updates(state, updates), moments), None

    return jax.jit(lambda state, moments, *batches: jax.lax.scan(step, (state, moments), batches)[0])


def _epoch_batches(
    key: jax.Array, train: Encoded, batch_size: int, max_sentences: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents [steps, batch], rows of their sentences [steps, batch, max_sentences] and a mask of those."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    order = rng.permutation(np.flatnonzero(train.counts > 0))
    size = min(batch_size, len(order))
    order = order[: len(order) // size * size]
    places = np.zeros((len(order), max_sentences), np.int32)
    where = np.arange(max_sentences)[None] < train.counts[order][:, None]
    for i, row in enumerate(order):
        count = int(train.counts[row])
        chosen = rng.permutation(count)[:max_sentences] if count > max_sentences else np.arange(count)
        places[i, : len(chosen)] = train.offsets[row] + chosen
    shape = (len(order) // size, size)
    return order.reshape(shape).astype(np.int32), places.reshape(*shape, -1), where.reshape(*shape, -1)


def train_votes(
    key: Key[Array, ""],
    train: Encoded,
    validation: Encoded,
    shares: np.ndarray,
    *,
    epsilon: float,
    hidden: int = 128,
    batch_size: int = 128,
    learning_rate: float = 2e-3,
    max_sentences: int = 24,
    epochs: int = 12,
) -> Classifier:
    """Learns what a sentence votes: scores in [0, 1] whose private draw at `epsilon` finds the label most often.

    The exponential mechanism over candidates draws class c with probability P(c) proportional to
    `shares[c] exp(epsilon / 2 sum_i votes(s_i)[c])`. Training maximises sqrt(P(label)), between likelihood, which
    would hedge, and P itself, whose gradient vanishes where it is small (Zhang & Sabuncu 2018,
    arXiv:1805.07836). Any bounded votes serve any other epsilon too, less well.

    Args:
      shares: of the classes among the candidates.
    """
    known = train.take(np.flatnonzero((train.labels >= 0) & (train.counts > 0)))
    centre = known.vectors.mean(0)
    scale = float(np.sqrt(((known.vectors - centre) ** 2).mean()) + 1e-12)
    x, y = jnp.asarray((known.vectors - centre) / scale), jnp.asarray(known.labels)
    log_shares = np.log(np.maximum(shares, 1e-6)).astype(np.float32)
    graph, state = nnx.split(MLP(x.shape[1], hidden, len(shares), nnx.Rngs(keys.stream(key, "initial"))))
    steps = max(1, len(y) // min(batch_size, len(y))) * epochs
    optimizer = optax.adamw(optax.cosine_decay_schedule(learning_rate, steps), weight_decay=1e-3)
    moments, best, kept = optimizer.init(state), -1.0, state

    def loss(state, row, place, mask):
        votes = jax.nn.sigmoid(nnx.merge(graph, state)(x[place]))
        totals = jnp.where(mask[..., None], votes, 0).sum(1)
        log_p = jax.nn.log_softmax(log_shares[None] + epsilon / 2 * totals)
        return -jnp.exp(jnp.take_along_axis(log_p, y[row][:, None], 1) / 2).mean()

    epoch = _make_epoch(optimizer, loss)
    for number in range(epochs):
        batches = _epoch_batches(
            keys.for_round(keys.stream(key, "order"), number), known, batch_size, max_sentences
        )
        state, moments = epoch(state, moments, *batches)
        now = Classifier(graph, state, centre, scale)
        votes = now.votes(validation.vectors)
        totals = validation.sums(votes)
        law = np.asarray(jax.nn.softmax(log_shares[None] + epsilon / 2 * totals.astype(np.float32)))
        right = [law[validation.labels == c, c].mean() for c in np.unique(validation.labels) if c >= 0]
        if np.mean(right) > best:
            best, kept = float(np.mean(right)), state
    return Classifier(graph, kept, centre, scale)


def kmeans(key: Key[Array, ""], points: np.ndarray, num_clusters: int) -> tuple[np.ndarray, np.ndarray]:
    """Centres [num_clusters, dim] and each point's cluster, by k-means++ and Lloyd's steps (scipy)."""
    from scipy.cluster.vq import kmeans2

    seed = np.asarray(jax.random.key_data(key))
    num_clusters = min(num_clusters, len(np.unique(points, axis=0)))
    centres, labels = kmeans2(
        points.astype(np.float64), num_clusters, iter=25, minit="++", rng=np.random.default_rng(seed)
    )
    return centres.astype(np.float32), labels.astype(np.int32)
