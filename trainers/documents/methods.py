"""The methods side by side: what each can be varied in, how it releases, how its releases are classified.

A method has variants; validation documents, which are public, choose one for each epsilon. Utility-based
methods draw a candidate, so their score tables are computed once and serve every epsilon and trial.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpriv import depth, keys
from trainers.documents import mechanisms, networks
from trainers.documents.config import Config
from trainers.documents.data import Encoded
from trainers.documents.public import Public, unit


class Released(NamedTuple):
    """One release of every document: embeddings [documents, dim'], and the candidate each one is (-1: none)."""

    vectors: np.ndarray
    candidates: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """How documents are released.

    variants: what validation chooses among. utility: its name in `accounting.document_epsilon`.
    prepare: what all epsilons of a set of documents share. draws: whether a candidate is drawn (its
    guarantee then holds up to `selection.residual`), else noise is added (which assumes real arithmetic).
    release: (prepared, documents, one key a document, epsilon, variant) to Released.
    predict: (released, epsilon, variant) to class indices.
    """

    name: str
    variants: tuple[str, ...]
    utility: str
    draws: bool
    prepare: Callable[[Encoded], Any]
    release: Callable[[Any, Encoded, jax.Array, float, str], Released]
    predict: Callable[[Released, float, str], np.ndarray]


def build(config: Config, public: Public, train: Encoded, validation: Encoded) -> dict[str, Method]:
    """The methods of `config.methods` that need sentence embeddings only (all but word_mdp)."""
    makers = {
        "truncation": _truncation,
        "deepcandidate": _deepcandidate,
        "deepcandidate_no_recoder": _depth_without_recoder,
        "bounded_sum": _bounded_sum,
        "low_rank": _low_rank,
    }
    return {
        name: makers[name](config, public, train, validation) for name in config.methods if name in makers
    }


def _drawn(
    config: Config,
    name: str,
    utility: str,
    variants: tuple[str, ...],
    scores: Callable[[Encoded], dict[str, np.ndarray]],
    embeddings: np.ndarray,
    labels: np.ndarray,
    *,
    sensitivity: int,
    most_a_sentence: float,
) -> Method:
    """A method that draws a candidate; scores are at most `most_a_sentence` times the number of sentences."""

    def release(prepared, documents, key_rows, epsilon, variant):
        drawn = mechanisms.select(
            key_rows,
            prepared[variant],
            epsilon=epsilon,
            sensitivity=sensitivity,
            max_score=int(most_a_sentence * documents.counts.max(initial=1)),
            mechanism=config.selection,
        )
        return Released(embeddings[drawn], drawn)

    return Method(
        name=name,
        variants=variants,
        utility=utility,
        draws=True,
        prepare=scores,
        release=release,
        predict=lambda released, epsilon, variant: labels[released.candidates],
    )


def _deepcandidate(config: Config, public: Public, train: Encoded, validation: Encoded) -> Method:
    prepared = jax.jit(depth.prepare)(public.recoded_means, public.directions)

    def scores(documents):
        recoded = documents.with_vectors(public.recoder(documents.vectors))
        found = mechanisms.depth_scores(recoded, prepared, num_directions=config.num_directions)
        return {f"{p} random directions": found[p] for p in config.num_directions}

    variants = tuple(f"{p} random directions" for p in config.num_directions)
    labels = public.recoded_classifier.predict(public.recoded_means)
    return _drawn(
        config, "deepcandidate", "strict_depth", variants, scores, public.recoded_means, labels,
        sensitivity=1, most_a_sentence=0.5,
    )  # fmt: skip


def _depth_without_recoder(config: Config, public: Public, train: Encoded, validation: Encoded) -> Method:
    axes = tuple(r for r in config.num_axes if r <= len(public.principal))
    kinds = {
        "random directions": (public.directions, config.num_directions),
        "principal axes": (public.principal, axes),
    }
    prepared = {k: jax.jit(depth.prepare)(public.means, d) for k, (d, _) in kinds.items()}

    def scores(documents):
        out = {}
        for kind, (_, numbers) in kinds.items():
            found = mechanisms.depth_scores(documents, prepared[kind], num_directions=numbers)
            out.update({f"{p} {kind}": found[p] for p in numbers})
        return out

    variants = tuple(f"{p} {kind}" for kind, (_, numbers) in kinds.items() for p in numbers)
    labels = public.classifier.predict(public.means)
    return _drawn(
        config, "deepcandidate_no_recoder", "strict_depth", variants, scores, public.means, labels,
        sensitivity=1, most_a_sentence=0.5,
    )  # fmt: skip


def _bounded_sum(config: Config, public: Public, train: Encoded, validation: Encoded) -> Method:
    labels = public.classifier.predict(public.means)
    cosine = unit(public.means)
    votes = np.eye(len(train.classes), dtype=np.float32)[labels]
    ranges = {f"cosine {a:g}-{b:g}%": (a, b) for a, b in ((50.0, 99.0), (50.0, 99.9), (80.0, 99.9))}

    def scores(documents):
        out = {}
        for name, (a, b) in ranges.items():
            out[name] = mechanisms.bounded_scores(
                documents,
                cosine,
                low=public.quantiles[a],
                high=public.quantiles[b],
                num_steps=config.num_steps,
            )
        # Learned on public sentences: how likely a sentence is to come from a document of the candidate's label.
        posterior = public.sentence_classifier.posterior(documents.vectors)
        width = public.quantiles[99.9] - public.quantiles[50.0]
        features = {
            "learned": (posterior, votes, 0.0, 1.0),
            "learned and cosine": (
                np.concatenate([posterior, documents.vectors / width], 1),
                np.concatenate([votes, cosine], 1),
                public.quantiles[50.0] / width,
                public.quantiles[50.0] / width + 2.0,
            ),
        }
        for name, (sentences, candidates, low, high) in features.items():
            out[name] = mechanisms.bounded_scores(
                documents.with_vectors(sentences), candidates, low=low, high=high, num_steps=config.num_steps
            )
        return out

    variants = (*ranges, "learned", "learned and cosine")
    return _drawn(
        config, "bounded_sum", "bounded_sum", variants, scores, public.means, labels,
        sensitivity=config.num_steps, most_a_sentence=config.num_steps,
    )  # fmt: skip


def _noised(
    config: Config,
    name: str,
    variants: tuple[str, ...],
    noise: Callable[[Encoded, jax.Array, float, str], np.ndarray],
    train: Encoded,
    validation: Encoded,
) -> Method:
    """A method that adds noise; its classifier has learned from public documents released the same way."""
    classifiers: dict[tuple[float, str], networks.Classifier] = {}
    root = keys.stream(keys.root(config.seed), f"{name}: public releases to learn from")

    def classifier(epsilon, variant):
        if (epsilon, variant) not in classifiers:
            stream = keys.stream(root, f"{epsilon:g} {variant}")
            released = [
                noise(x, jax.random.split(keys.stream(stream, part), len(x.ids)), epsilon, variant)
                for part, x in (("train", train), ("validation", validation))
            ]
            classifiers[epsilon, variant] = networks.train_classifier(
                keys.stream(stream, "classifier"),
                released[0],
                train.labels,
                (released[1], validation.labels),
                len(train.classes),
            )
        return classifiers[epsilon, variant]

    def release(prepared, documents, key_rows, epsilon, variant):
        vectors = noise(documents, key_rows, epsilon, variant)
        return Released(vectors, np.full(len(vectors), -1, np.int32))

    return Method(
        name=name,
        variants=variants,
        utility=name,
        draws=False,
        prepare=lambda documents: None,
        release=release,
        predict=lambda released, epsilon, variant: classifier(epsilon, variant).predict(released.vectors),
    )


def _truncation(config: Config, public: Public, train: Encoded, validation: Encoded) -> Method:
    """The paper's baseline; its classifier learns from truncated means without noise."""

    def clamped(x):
        return x.with_vectors(np.clip(x.vectors, public.low, public.high)).means

    classifier = networks.train_classifier(
        keys.stream(keys.root(config.seed), "truncation classifier"),
        clamped(train),
        train.labels,
        (clamped(validation), validation.labels),
        len(train.classes),
    )

    def release(prepared, documents, key_rows, epsilon, variant):
        vectors = mechanisms.truncated_means(documents, key_rows, public.low, public.high, epsilon=epsilon)
        return Released(vectors, np.full(len(vectors), -1, np.int32))

    return Method(
        name="truncation",
        variants=("central 75 %",),
        utility="truncation",
        draws=False,
        prepare=lambda documents: None,
        release=release,
        predict=lambda released, epsilon, variant: classifier.predict(released.vectors),
    )


def _low_rank(config: Config, public: Public, train: Encoded, validation: Encoded) -> Method:
    dim, num_classes = train.vectors.shape[1], len(train.classes)
    spaces: dict[str, tuple[np.ndarray, bool]] = {
        f"{r} principal axes": (public.principal[:r], False) for r in config.num_axes if r <= dim
    }
    spaces[f"{len(public.discriminant)} discriminant axes"] = (public.discriminant, False)
    spaces["learned posterior"] = (np.eye(num_classes, dtype=np.float32), True)

    def features(documents, learned):
        if learned:
            return documents.with_vectors(
                public.sentence_classifier.posterior(documents.vectors) - 1 / num_classes
            )
        return documents.with_vectors(documents.vectors - public.centre)

    norms = {}
    for variant, (axes, learned) in spaces.items():
        sample = features(train.take(np.arange(min(len(train.ids), 1000))), learned).vectors @ axes.T
        norms[variant] = float(np.median(np.linalg.norm(sample, axis=1)))

    def noise(documents, key_rows, epsilon, variant):
        axes, learned = spaces[variant]
        found = mechanisms.noised_means(
            features(documents, learned), key_rows, axes, max_norm=norms[variant], epsilon=epsilon
        )
        return found if learned else (public.centre + found @ axes).astype(np.float32)

    return _noised(config, "low_rank", tuple(spaces), noise, train, validation)
