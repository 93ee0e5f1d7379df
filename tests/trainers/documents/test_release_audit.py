"""Tell two documents apart by what the whole pipeline releases of them: text, sentences, encoder, scores, draw.

They differ in one planted sentence, and the candidates are the worst that there can be: one like the first
document, many like the second. Counts of thousands of releases bound the loss from below (Clopper-Pearson): it
stays under epsilon, and variants that are wrong in one place pass it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxpriv import keys, selection
from trainers.documents import choices, data, encoder, mechanisms, methods, release, store

EPSILON, RELEASES, OTHERS = 2.0, 6000, 24
COMMON, PLANTED, OTHER = (
    "In the of and was.",
    "Ship captain storm wave sail tide.",
    "Oven flour sugar butter salt pan.",
)


@pytest.fixture(scope="module")
def pipeline(fitted, toy_encoder):
    """A function from the sampler's name to methods with the worst candidates, and the two documents."""
    found = store.load(fitted)
    texts = [f"{COMMON} {PLANTED}", f"{COMMON} {OTHER}"]
    documents = data.encode(
        data.Documents(["x", "y"], texts, ["", ""]),
        encoder.SentenceEncoder(toy_encoder),
        splitter="sentencex",
        classes=found.train.classes,
    )
    assert (documents.counts == 2).all()
    rows = [0] + [1] * OTHERS
    public = dataclasses.replace(
        found.public,
        rows=np.array(rows),
        means=documents.means[rows],
        recoded_means=documents.with_vectors(found.public.recoder(documents.vectors)).means[rows],
    )

    def build(sampler):
        config = dataclasses.replace(found.config, selection=sampler)
        return methods.build(config, public, found.train, found.validation)

    return build, documents


def releases(method, documents, row, variant, *, stream):
    """Many releases of one document."""
    root = keys.stream(jax.random.key(5), f"{stream} {row}")
    many = documents.take([row] * RELEASES)
    return release.release_all(
        method, many, jax.random.split(root, RELEASES), EPSILON, choices.always(variant)
    )


def measured_loss(one, two):
    """The largest log ratio that the counts of the outcomes prove, either way round, at 1e-4 for all together."""
    outcomes, places = np.unique([*one, *two], return_inverse=True)
    counts = [np.bincount(p, minlength=len(outcomes)) for p in (places[: len(one)], places[len(one) :])]
    level, best = 1e-4 / (4 * len(outcomes)), 0.0
    for a, b in (counts, counts[::-1]):
        low = scipy.stats.beta.ppf(level, np.maximum(a, 1), RELEASES - np.maximum(a, 1) + 1) * (a > 0)
        high = scipy.stats.beta.ppf(1 - level, b + 1, np.maximum(RELEASES - b, 1))
        with np.errstate(divide="ignore"):
            best = max(best, np.log(low / high).max())
    return best


LAWS = {"exponential": selection.log_probs, "permute_and_flip": selection.permute_and_flip_log_probs}


def drawn_loss(pipeline, name, variant, sensitivity, sampler):
    """`(measured loss, exact loss)`; the outcomes are the one candidate and all the others."""
    build, documents = pipeline
    method = build(sampler)[name]
    scores = method.prepare(documents, (variant,))[variant]
    laws = [
        LAWS[sampler](jnp.asarray(s, jnp.int32), epsilon=EPSILON, sensitivity=sensitivity) for s in scores
    ]
    exact = float(jnp.abs(laws[0] - laws[1]).max())
    one, two = (
        np.minimum(releases(method, documents, row, variant, stream=name).candidates, 1) for row in (0, 1)
    )
    return measured_loss(one, two), exact


CASES = [
    ("deepcandidate", "10 random directions", 1, "exponential"),
    ("deepcandidate", "10 random directions", 1, "permute_and_flip"),
    ("bounded_sum", "cosine 50-99%", 32, "permute_and_flip"),
]


@pytest.mark.parametrize(("name", "variant", "sensitivity", "sampler"), CASES)
def test_a_planted_sentence_stays_within_epsilon(pipeline, name, variant, sensitivity, sampler):
    measured, exact = drawn_loss(pipeline, name, variant, sensitivity, sampler)
    assert 0.9 * EPSILON < exact <= EPSILON * (1 + 1e-5)  # there is something to find
    assert 0.5 * EPSILON < measured <= EPSILON


@pytest.mark.parametrize(("name", "variant", "sensitivity", "sampler"), CASES)
def test_a_missing_half_is_caught(pipeline, monkeypatch, name, variant, sensitivity, sampler):
    right = selection.weights
    monkeypatch.setattr(selection, "weights", lambda *, epsilon, **rest: right(epsilon=2 * epsilon, **rest))
    assert drawn_loss(pipeline, name, variant, sensitivity, sampler)[0] > EPSILON


def test_ties_broken_by_the_data_are_caught(pipeline, monkeypatch):
    """The level is drawn rightly, its member is the first in an order that the document's scores give."""
    build, documents = pipeline
    right = mechanisms.select

    def by_data(key_rows, scores, **rest):
        index = right(key_rows, scores, **rest)
        seed = int(scores[0].astype(np.int64) @ np.arange(scores.shape[1]))
        order = np.random.default_rng(seed).permutation(scores.shape[1])
        first = {level: order[scores[0][order] == level][0] for level in np.unique(scores[0])}
        return np.array([first[level] for level in scores[0][index]])

    monkeypatch.setattr(mechanisms, "select", by_data)
    method, variant = build("exponential")["deepcandidate"], "10 random directions"
    one, two = (releases(method, documents, row, variant, stream="ties").candidates for row in (0, 1))
    assert measured_loss(one, two) > EPSILON


@pytest.mark.parametrize("noise", [1.0, 0.25])
def test_low_rank_noise_hides_a_planted_sentence_and_too_little_does_not(pipeline, monkeypatch, noise):
    build, documents = pipeline
    method, variant = build("exponential")["low_rank"], "learned votes"
    x, y = method.prepare(documents, (variant,))[variant]
    right = mechanisms.low_rank_noise
    monkeypatch.setattr(mechanisms, "low_rank_noise", lambda *a, **rest: noise * right(*a, **rest))

    def nearer(row):  # the likelihood ratio in five steps
        z = releases(method, documents, row, variant, stream="low rank").vectors
        gap = np.linalg.norm(z - y, axis=1) - np.linalg.norm(z - x, axis=1)
        return np.digitize(gap / np.linalg.norm(x - y), [-0.9, -0.3, 0.3, 0.9])

    loss = measured_loss(nearer(0), nearer(1))
    assert (loss <= EPSILON) == (noise == 1.0)
    assert loss > 0.3 * EPSILON
