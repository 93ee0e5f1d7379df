"""Accuracies and perplexity against their definitions, one token at a time."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracles import keyboard as oracle
from tests.trainers.keyboard import data
from trainers.keyboard import evaluate, model

CONFIG = model.ModelConfig(num_tokens=data.WORDS + 4, embedding_size=6, hidden_size=12)


def params(scale=1.0):
    rng = np.random.default_rng(2)
    start = model.init_params(CONFIG, seed=0)
    moved = {name: p + scale * rng.standard_normal(p.shape).astype(np.float32) for name, p in start.items()}
    # It likes the end of a sentence, so that the two accuracies differ.
    return moved | {"output_bias": moved["output_bias"].at[data.WORDS + 3].add(3.0)}


def test_equals_the_definitions():
    rows = np.concatenate(data.clients(5, sizes=(40, 0, 70)))
    got = evaluate.evaluate(params(), rows, CONFIG)
    want = oracle.evaluation(params(), rows, "cifg", data.WORDS)
    np.testing.assert_allclose(got[:4], want, rtol=1e-4)
    assert got.num_targets == np.count_nonzero(rows[:, 1:])
    assert got.num_words == np.count_nonzero((rows[:, 1:] >= 1) & (rows[:, 1:] <= data.WORDS))
    assert got.tff_accuracy < got.top1_words


def test_ties_go_to_the_smaller_word_and_special_tokens_are_banned_from_words_only():
    flat = {name: jnp.zeros_like(p) for name, p in params().items()}
    flat["output_bias"] = flat["output_bias"].at[data.WORDS + 3].set(1.0)
    rows = np.array([[data.WORDS + 2, w, data.WORDS + 3] for w in (1, 2, 3, 4, data.WORDS + 1)], np.int32)
    got = evaluate.evaluate(flat, rows, CONFIG)
    assert got.top1_words == 25
    assert got.top3_words == 75
    assert got.tff_accuracy == 0
    assert (got.num_words, got.num_targets) == (4, 10)


def test_a_model_of_nan_has_no_hits():
    broken = {name: p * np.nan for name, p in params().items()}
    got = evaluate.evaluate(broken, data.clients()[0], CONFIG)
    assert got[:3] == (0, 0, 0)
    assert np.isnan(got.perplexity)


def test_nothing_to_evaluate():
    got = evaluate.evaluate(params(), np.zeros((0, data.WIDTH), np.int32), CONFIG)
    assert np.isnan(got[:4]).all()
    assert got.num_targets == 0


@pytest.mark.parametrize("pieces", [1, 3])
def test_order_does_not_matter(pieces):
    rows = np.concatenate(data.clients(6, sizes=(90,)))
    mixed = np.concatenate(np.array_split(rows, pieces)[::-1])
    np.testing.assert_allclose(
        evaluate.evaluate(params(), mixed, CONFIG)[:4],
        evaluate.evaluate(params(), rows, CONFIG)[:4],
        rtol=1e-5,
    )
