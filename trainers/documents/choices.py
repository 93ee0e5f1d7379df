"""Which variant of a method releases a document: chosen on public validation documents, by epsilon and by length.

The number of sentences is public under SentDP, and two documents that differ in one sentence have the same: the
choice by length depends on nothing private, and each variant that it may pick has the same guarantee.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpriv import keys
from trainers.documents import methods, networks
from trainers.documents.config import named
from trainers.documents.data import Encoded

GROUPS = ((2, 5), (6, 10), (11, 15), (16, 20), (21, None))  # sentences; 0 and 1 go with the first
LEAST_DOCUMENTS = 100  # of a group in validation, to choose for it: a macro-F1 of fewer says too little
MARGIN = (
    2.0  # points that a variant must be ahead in its group: about a standard error of a few hundred documents
)


class Choice(NamedTuple):
    """Variants of a method for one epsilon. overall: the best of all documents. by_length: one of each of GROUPS."""

    overall: str
    by_length: tuple[str, ...]

    def parts(self, counts: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Each variant that documents of `counts` sentences need, with the rows of those documents."""
        variants = np.array(self.by_length)[group_of(counts)]
        for variant in dict.fromkeys(self.by_length):
            rows = np.flatnonzero(variants == variant)
            if len(rows):
                yield variant, rows


def always(variant: str) -> Choice:
    """One variant for every length."""
    return Choice(variant, (variant,) * len(GROUPS))


def group_of(counts: np.ndarray) -> np.ndarray:
    """The index in GROUPS of documents of so many sentences.

    >>> group_of(np.array([0, 1, 5, 6, 20, 21, 9999])).tolist()
    [0, 0, 0, 1, 3, 4, 4]
    """
    return np.searchsorted([low for low, _ in GROUPS[1:]], counts, side="right")


def group_name(group: int) -> str:
    low, high = GROUPS[group]
    return f"{low}-{high}" if high else f"{low}+"


def choose(
    method: methods.Method, prepared: Any, validation: Encoded, root: jax.Array, epsilon: float
) -> tuple[Choice, float]:
    """The variants with the best macro-F1 on released validation documents, and the score of all together.

    A group of lengths takes the variant that is best overall unless another is clearly ahead on enough documents of
    the group; so that all releases have one form, it must release vectors as long as that one does.
    """
    labels, counts = validation.labels, validation.counts
    predicted = {}
    for variant in method.variants:
        stream = keys.stream(root, f"validation {method.name} {named(epsilon)} {variant}")
        key_rows = jax.random.split(stream, len(labels))
        released = method.release(prepared, counts, key_rows, epsilon, variant)
        predicted[variant] = method.predict(released, epsilon, variant)

    def score(predictions: np.ndarray, rows: np.ndarray) -> float:
        return networks.macro_f1(labels[rows], predictions[rows], len(validation.classes))

    everyone = np.arange(len(labels))
    overall = max(method.variants, key=lambda v: score(predicted[v], everyone))
    allowed = [v for v in method.variants if method.width(v) == method.width(overall)]
    by_length = []
    for group in range(len(GROUPS)):
        rows = np.flatnonzero(group_of(counts) == group)
        scores = {v: score(predicted[v], rows) for v in allowed}
        best = max(allowed, key=lambda v: scores[v])
        ahead = scores[best] - scores[overall] > MARGIN
        by_length.append(best if ahead and len(rows) >= LEAST_DOCUMENTS else overall)
    choice = Choice(overall, tuple(by_length))
    together = predicted[overall].copy()
    for variant, rows in choice.parts(counts):
        together[rows] = predicted[variant][rows]
    return choice, score(together, everyone)


def predict(
    method: methods.Method,
    prepared: dict[str, np.ndarray],
    counts: np.ndarray,
    key_rows: jax.Array,
    epsilon: float,
    choice: Choice,
) -> np.ndarray:
    """Releases every document by the variant for its length, and classifies what came out."""
    out = np.zeros(len(counts), np.int32)
    for variant, rows in choice.parts(counts):
        scores = {variant: prepared[variant][rows]}
        released = method.release(scores, counts[rows], key_rows[rows], epsilon, variant)
        out[rows] = method.predict(released, epsilon, variant)
    return out
