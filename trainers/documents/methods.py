"""The methods side by side: what each can be varied in, how it releases, how its releases are classified.

A method has variants; validation documents, which are public, choose one for each epsilon. Utility-based
methods draw a candidate, so their score tables are computed once and serve every epsilon and trial.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpriv import depth, keys, selection, worddp
from trainers.common.errors import InputError
from trainers.documents import mechanisms, networks
from trainers.documents.config import Config, named
from trainers.documents.data import Encoded
from trainers.documents.public import VOTE_EPSILONS, Public, unit


class Released(NamedTuple):
    """One release of every document: embeddings [documents, dim'], and the candidate each one is (-1: none)."""

    vectors: np.ndarray
    candidates: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """How documents are released.

    variants: what validation chooses among. utility: its name in `accounting.document_epsilon`.
    draws: whether a candidate is drawn (its guarantee then holds up to `selection.residual`), else noise is
    added (which assumes real arithmetic).
    prepare: (documents, variants) to what all epsilons and trials share, by variant; it is not private.
    release: (prepared, numbers of sentences, one key a document, epsilon, variant) to Released.
    predict: (released, epsilon, variant) to class indices.
    width: numbers of a vector that a variant releases.
    least_epsilon: the smallest epsilon that it serves for a document of so many sentences.
    """

    name: str
    variants: tuple[str, ...]
    utility: str
    draws: bool
    prepare: Callable[[Encoded, tuple[str, ...]], dict[str, Any]]
    release: Callable[[dict[str, Any], np.ndarray, jax.Array, float, str], Released]
    predict: Callable[[Released, float, str], np.ndarray]
    width: Callable[[str], int]
    least_epsilon: Callable[[int], float] = lambda count: 0.0

    def check(self, epsilon: float, documents: Encoded, what: str) -> None:
        """Refuses an epsilon, the option `what`, that is too small for the longest of the documents."""
        longest = int(documents.counts.max(initial=1))
        least = self.least_epsilon(longest)
        if epsilon < least:
            raise InputError(
                f"{what} {epsilon:g} is too small for {self.name} on a document of {longest} sentences: give at "
                f"least {least * 1.001:.3g}, leave that document out, or use low_rank, which has no such limit"
            )


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
    scores: Callable[[Encoded, tuple[str, ...]], dict[str, np.ndarray]],
    embeddings: np.ndarray,
    labels: np.ndarray,
    *,
    sensitivity: int,
    most_a_sentence: float,
) -> Method:
    """A method that draws a candidate; scores are at most `most_a_sentence` times the number of sentences."""

    def release(prepared, counts, key_rows, epsilon, variant):
        drawn = mechanisms.select(
            key_rows,
            prepared[variant],
            epsilon=epsilon,
            sensitivity=sensitivity,
            max_score=int(most_a_sentence * counts.max(initial=1)),
            mechanism=config.selection,
            devices=config.devices,
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
        width=lambda variant: embeddings.shape[1],
        least_epsilon=lambda count: selection.least_epsilon(
            sensitivity=sensitivity, max_score=int(most_a_sentence * count)
        ),
    )


def _depths(
    config: Config,
    documents: Encoded,
    prepared: depth.Prepared,
    kind: str,
    numbers: tuple[int, ...],
    wanted: tuple[str, ...],
) -> dict[str, np.ndarray]:
    """Depths for those of "P KIND" that are wanted."""
    numbers = tuple(p for p in numbers if f"{p} {kind}" in wanted)
    if not numbers:
        return {}
    found = mechanisms.depth_scores(documents, prepared, num_directions=numbers, devices=config.devices)
    return {f"{p} {kind}": found[p] for p in numbers}


def _deepcandidate(config: Config, public: Public, train: Encoded, validation: Encoded) -> Method:
    prepared = jax.jit(depth.prepare)(public.recoded_means, public.directions)

    def scores(documents, wanted):
        recoded = documents.with_vectors(public.recoder(documents.vectors))
        return _depths(config, recoded, prepared, "random directions", config.num_directions, wanted)

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
        "pair differences": (public.pairs, config.num_directions),
        "principal axes": (public.principal, axes),
    }
    prepared = {k: jax.jit(depth.prepare)(public.means, d) for k, (d, _) in kinds.items()}

    def scores(documents, wanted):
        out = {}
        for kind, (_, numbers) in kinds.items():
            out |= _depths(config, documents, prepared[kind], kind, numbers, wanted)
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
    q = public.quantiles
    ranges = {f"cosine {a:g}-{b:g}%": (q[a], q[b]) for a, b in ((50.0, 99.0), (50.0, 99.9), (80.0, 99.9))}
    # Learned on public sentences: how much a sentence speaks for the candidate's label.
    learned = {f"votes learned at {e:g}": v for e, v in zip(VOTE_EPSILONS, public.votes)}

    def scores(documents, wanted):
        out = {}
        for name, (low, high) in ranges.items():
            if name in wanted:
                out[name] = mechanisms.bounded_scores(
                    documents, cosine, low=low, high=high, num_steps=config.num_steps, devices=config.devices
                )
        for name, votes in learned.items():
            if name in wanted:
                out[name] = mechanisms.vote_scores(
                    documents, votes.votes(documents.vectors), labels, num_steps=config.num_steps
                )
        if _BOTH in wanted:  # half for the label, half for a candidate like the sentence
            votes = public.votes[-1].votes(documents.vectors)
            width = q[99.9] - q[50.0]
            out[_BOTH] = mechanisms.bounded_scores(
                documents.with_vectors(np.concatenate([votes, documents.vectors / width], 1)),
                np.concatenate([np.eye(votes.shape[1], dtype=np.float32)[labels], cosine], 1),
                low=q[50.0] / width,
                high=q[50.0] / width + 2.0,
                num_steps=config.num_steps,
                devices=config.devices,
            )
        return out

    return _drawn(
        config, "bounded_sum", "bounded_sum", (*ranges, *learned, _BOTH), scores, public.means, labels,
        sensitivity=config.num_steps, most_a_sentence=config.num_steps,
    )  # fmt: skip


_BOTH = "votes and cosine"


def _truncation(config: Config, public: Public, train: Encoded, validation: Encoded) -> Method:
    """The paper's baseline; its classifier learns from truncated means without noise."""
    (variant,) = variants = ("central 75 %",)

    def means(documents, wanted=variants):
        found = mechanisms.truncated_means(documents, public.low, public.high, devices=config.devices)
        return {variant: found}

    classifier = networks.train_classifier(
        keys.stream(keys.root(config.seed), "truncation classifier"),
        means(train)[variant],
        train.labels,
        (means(validation)[variant], validation.labels),
        len(train.classes),
    )

    def release(prepared, counts, key_rows, epsilon, variant):
        noise = mechanisms.truncation_noise(key_rows, counts, public.low, public.high, epsilon=epsilon)
        return Released(prepared[variant] + noise, np.full(len(noise), -1, np.int32))

    return Method(
        name="truncation",
        variants=variants,
        utility="truncation",
        draws=False,
        prepare=means,
        release=release,
        predict=lambda released, epsilon, variant: classifier.predict(released.vectors),
        width=lambda variant: public.means.shape[1],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Space:
    """Public axes, rows of `axes`, that low-rank means live in. learned: of votes instead of embeddings.

    nearest: the released vector is the candidate that is nearest in the space (post-processing).
    """

    axes: np.ndarray
    learned: bool = False
    nearest: bool = False


def _low_rank(config: Config, public: Public, train: Encoded, validation: Encoded) -> Method:
    """Noise in few dimensions; a classifier of its own has learned from public documents released the same way."""
    spaces = {
        f"{r} principal axes": _Space(axes=public.principal[:r])
        for r in config.num_axes
        if r <= len(public.principal)
    }
    spaces[f"{len(public.discriminant)} discriminant axes"] = _Space(axes=public.discriminant)
    for name in list(spaces)[1::3]:  # the second number of principal axes, and the discriminant ones
        spaces[f"{name}, nearest candidate"] = dataclasses.replace(spaces[name], nearest=True)
    contrasts = np.linalg.svd(np.eye(len(train.classes)) - 1 / len(train.classes))[2][:-1]
    spaces["learned votes"] = _Space(axes=contrasts.astype(np.float32), learned=True)
    labels = public.classifier.predict(public.means)

    def features(documents, space):
        if space.learned:
            return documents.with_vectors(public.votes[-1].votes(documents.vectors))
        return documents.with_vectors(documents.vectors - public.centre)

    sample = train.take(np.arange(min(len(train.ids), 1000)))
    norms = {
        variant: float(np.median(np.linalg.norm(features(sample, s).vectors @ s.axes.T, axis=1)))
        for variant, s in spaces.items()
    }

    def means(documents, wanted=tuple(spaces)):
        return {
            variant: mechanisms.clipped_means(
                features(documents, spaces[variant]),
                spaces[variant].axes,
                max_norm=norms[variant],
                devices=config.devices,
            )
            for variant in wanted
        }

    def noised(prepared, counts, key_rows, epsilon, variant):
        return prepared[variant] + mechanisms.low_rank_noise(
            key_rows, counts, len(spaces[variant].axes), max_norm=norms[variant], epsilon=epsilon
        )

    def release(prepared, counts, key_rows, epsilon, variant):
        space, found = spaces[variant], noised(prepared, counts, key_rows, epsilon, variant)
        rows = np.full(len(found), -1, np.int32)
        if space.learned:
            return Released(found, rows)
        if space.nearest:
            places = (public.means - public.centre) @ space.axes.T
            rows = np.asarray(worddp.nearest(jnp.asarray(found), jnp.asarray(places)))
            return Released(public.means[rows], rows)
        return Released((public.centre + found @ space.axes).astype(np.float32), rows)

    root = keys.stream(keys.root(config.seed), "low_rank: public releases to learn from")
    classifiers: dict[tuple[float, str], networks.Classifier] = {}
    public_means: dict[str, list[np.ndarray]] = {}  # of train and validation, for each variant

    def classifier(epsilon, variant):
        if variant not in public_means:
            public_means[variant] = [means(x, (variant,))[variant] for x in (train, validation)]
        if (epsilon, variant) not in classifiers:
            stream = keys.stream(root, f"{named(epsilon)} {variant}")
            found = [
                noised(
                    {variant: prepared},
                    x.counts,
                    jax.random.split(keys.stream(stream, part), len(x.ids)),
                    epsilon,
                    variant,
                )
                for prepared, part, x in zip(
                    public_means[variant], ("train", "validation"), (train, validation)
                )
            ]
            classifiers[epsilon, variant] = networks.train_classifier(
                keys.stream(stream, "classifier"),
                found[0],
                train.labels,
                (found[1], validation.labels),
                len(train.classes),
                hidden=64,
            )
        return classifiers[epsilon, variant]

    def predict(released, epsilon, variant):
        space = spaces[variant]
        if space.nearest:
            return labels[released.candidates]
        found = released.vectors if space.learned else (released.vectors - public.centre) @ space.axes.T
        return classifier(epsilon, variant).predict(found)

    return Method(
        name="low_rank",
        variants=tuple(spaces),
        utility="low_rank",
        draws=False,
        prepare=means,
        release=release,
        predict=predict,
        width=lambda variant: len(contrasts) if spaces[variant].learned else public.means.shape[1],
    )
