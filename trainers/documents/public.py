"""What is prepared from public documents: candidates, directions, axes, boxes, recoder, classifiers.

Nothing here ever sees a private document, so none of it costs privacy.
"""

import dataclasses

import jax
import numpy as np

from jaxpriv import keys
from trainers.common.errors import InputError
from trainers.documents import networks
from trainers.documents.config import Config, named
from trainers.documents.data import Encoded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Public:
    """Public arrays and networks; every method takes what it needs.

    rows: training documents that are candidates. means: their mean embeddings, [candidates, dim].
    classifier: labels from mean embeddings. recoder, recoded_classifier: H and its MLP.
    directions: random unit vectors. principal, discriminant: orthonormal public axes, most telling first.
    recoded_means: of the candidates' recoded sentences.
    votes: what a sentence votes, learned for each of VOTE_EPSILONS. pairs: unit differences of candidate pairs.
    centre: mean of the public sentences. low, high: the box of truncation, [dim].
    quantiles: of public sentence-candidate cosines, by percent.
    """

    rows: np.ndarray
    means: np.ndarray
    classifier: networks.Classifier
    recoder: networks.Recoder
    recoded_classifier: networks.Classifier
    recoded_means: np.ndarray
    votes: tuple[networks.Classifier, ...]
    directions: np.ndarray
    pairs: np.ndarray
    principal: np.ndarray
    discriminant: np.ndarray
    centre: np.ndarray
    low: np.ndarray
    high: np.ndarray
    quantiles: dict[float, float]


QUANTILES = (50.0, 80.0, 99.0, 99.9)
VOTE_EPSILONS = (2.0, 5.0, 10.0)


def prepare(config: Config, train: Encoded, validation: Encoded) -> Public:
    """Everything public, from training documents; validation documents choose epochs."""
    num_classes = len(train.classes)
    if num_classes < 2:
        raise InputError(f"the training documents have {num_classes} label(s); at least 2 are needed")
    root = keys.root(config.seed)
    generator = np.random.default_rng(np.asarray(jax.random.key_data(keys.stream(root, "candidates"))))
    means = train.means
    rows = choose_candidates(generator, train, config)
    classifier = networks.train_classifier(
        keys.stream(root, "classifier"),
        means,
        train.labels,
        (validation.means, validation.labels),
        num_classes,
    )
    recoder, recoded = fit_recoder(config, train, validation, root)
    centre = train.vectors.mean(0)
    directions = generator.normal(size=(max(config.num_directions), means.shape[1]))
    sample = train.vectors[generator.integers(0, len(train.vectors), 2000)]
    cosines = sample @ unit(means[rows]).T
    low, high = np.percentile(means, [12.5, 87.5], axis=0).astype(np.float32)
    shares = np.bincount(classifier.predict(means[rows]), minlength=num_classes) / len(rows)
    return Public(
        rows=rows,
        means=means[rows],
        classifier=classifier,
        recoder=recoder,
        recoded_classifier=recoded,
        recoded_means=train.take(rows).with_vectors(recoder(train.take(rows).vectors)).means,
        votes=tuple(
            networks.train_votes(
                keys.stream(root, f"votes {named(epsilon)}"), train, validation, shares, epsilon=epsilon
            )
            for epsilon in VOTE_EPSILONS
        ),
        directions=unit(directions.astype(np.float32)),
        pairs=pair_differences(generator, means[rows], max(config.num_directions)),
        principal=principal_axes(means - centre, max(config.num_axes)),
        discriminant=discriminant_axes(means - centre, train.labels, num_classes),
        centre=centre,
        low=low,
        high=high,
        quantiles={q: float(v) for q, v in zip(QUANTILES, np.percentile(cosines, QUANTILES))},
    )


def choose_candidates(generator: np.random.Generator, train: Encoded, config: Config) -> np.ndarray:
    """Training documents with enough sentences, in random order, so that any first part is a sample too."""
    counts = train.counts
    wanted = min(config.num_candidates, int(np.sum(counts >= 2)))
    least = config.min_candidate_sentences
    # Short documents (docstrings) rarely reach 8 sentences: the bar is lowered until half the wanted remain.
    while least > 2 and np.sum(counts >= least) < wanted / 2:
        least -= 1
    eligible = np.flatnonzero(counts >= least)
    if len(eligible) < 2:
        raise InputError("fewer than two training documents have 2 sentences or more: nothing to choose from")
    if config.candidates == "kmedoids" and len(eligible) > config.num_candidates:
        points = train.means[eligible]
        seed = jax.random.key(int(generator.integers(2**31)))
        centres, _ = networks.kmeans(seed, points, config.num_candidates)
        eligible = eligible[nearest_distinct(centres, points)]
    return generator.permutation(eligible)[: config.num_candidates]


def nearest_distinct(centres: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The row of `points` nearest to each centre in turn, none twice: k-medoids from k-means."""
    squares = (points**2).sum(1)[None] - 2 * centres @ points.T
    chosen = np.zeros(len(centres), np.int64)
    for i, row in enumerate(squares):
        chosen[i] = row.argmin()
        squares[:, chosen[i]] = np.inf
    return chosen


def pair_differences(generator: np.random.Generator, points: np.ndarray, num: int) -> np.ndarray:
    """Unit differences of `num` random pairs of points: directions along which candidates really differ."""
    first = generator.integers(0, len(points), num)
    second = (first + generator.integers(1, len(points), num)) % len(points)
    return unit(points[first] - points[second]).astype(np.float32)


def fit_recoder(
    config: Config, train: Encoded, validation: Encoded, root: jax.Array
) -> tuple[networks.Recoder, networks.Classifier]:
    """H and its classifier, at the epoch whose recoded validation documents are classified best."""
    num_classes = len(train.classes)
    _, clusters = networks.kmeans(keys.stream(root, "clusters"), train.means, config.num_clusters)
    best: tuple[float, networks.Recoder, networks.Classifier] | None = None
    epochs = networks.train_recoder(
        keys.stream(root, "recoder"), train, clusters, num_clusters=config.num_clusters
    )
    for number, recoder in enumerate(epochs):
        if number + 1 not in RECODER_EPOCHS:
            continue
        recoded, held_out = (x.with_vectors(recoder(x.vectors)) for x in (train, validation))
        classifier = networks.train_classifier(
            keys.stream(root, "recoded classifier"),
            recoded.means,
            train.labels,
            (held_out.means, validation.labels),
            num_classes,
        )
        score = networks.macro_f1(validation.labels, classifier.predict(held_out.means), num_classes)
        if best is None or score > best[0]:
            best = score, recoder, classifier
    assert best is not None
    return best[1], best[2]


RECODER_EPOCHS = (2, 5, 10, 20)


def principal_axes(points: np.ndarray, num: int) -> np.ndarray:
    """The `num` directions of largest variance, orthonormal rows."""
    return np.linalg.svd(points, full_matrices=False)[2][:num].astype(np.float32)


def discriminant_axes(points: np.ndarray, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Fisher's directions between classes, at most num_classes - 1 orthonormal rows; within-class scatter shrunk."""
    from scipy.linalg import eigh

    dim = points.shape[1]
    within, between = np.zeros((dim, dim)), np.zeros((dim, dim))
    for c in range(num_classes):
        group = points[labels == c].astype(np.float64)
        if len(group):
            middle = group.mean(0)
            within += (group - middle).T @ (group - middle)
            between += len(group) * np.outer(middle, middle)
    within += np.trace(within) / dim * np.eye(dim)
    vectors = eigh(between, within)[1][:, ::-1][:, : num_classes - 1]
    return np.linalg.qr(vectors)[0].T.astype(np.float32)


def unit(rows: np.ndarray) -> np.ndarray:
    """Rows of L2 norm 1; zero rows stay."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
