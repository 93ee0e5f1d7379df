"""The model against its formulas in float64, and the packed gradients against plain differentiation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.oracles import keyboard as oracle
from tests.trainers.keyboard import data
from trainers.keyboard import batches, model, packed

CELLS = [("cifg", False), ("cifg", True), ("lstm", True)]


def config(cell, shared, hidden=12):
    return model.ModelConfig(
        num_tokens=data.WORDS + 4, embedding_size=6, hidden_size=hidden, cell=cell, shared_embeddings=shared
    )


def some_params(cell, shared):
    """Initial values moved away from zero, so that every bias and every gate matters."""
    params = model.init_params(config(cell, shared), seed=3)
    rng = np.random.default_rng(1)
    return {name: p + 0.3 * rng.standard_normal(p.shape).astype(np.float32) for name, p in params.items()}


@pytest.mark.parametrize(("cell", "shared"), CELLS)
def test_loss_and_logits_follow_the_formulas(cell, shared):
    params = some_params(cell, shared)
    rows = data.clients()[3]
    inputs, targets = jnp.asarray(rows[:, :-1].T), jnp.asarray(rows[:, 1:].T)
    want = np.stack([oracle.sentence_scores(params, row[:-1], cell) for row in rows], 1)
    logits, loss = (jax.jit(f, static_argnames="cell") for f in (model.logits, model.loss))
    np.testing.assert_allclose(logits(params, inputs, cell=cell), want, rtol=1e-4, atol=1e-5)
    got = loss(params, inputs, targets, cell=cell)
    np.testing.assert_allclose(got, oracle.batch_loss(params, rows, cell), rtol=1e-5)


def test_the_module_and_the_functions_are_one_model():
    cfg = config("cifg", False)
    module = model.KeyboardLM(cfg, rngs=nnx.Rngs(params=jax.random.key(5)))
    inputs = jnp.asarray(data.clients()[0][:, :-1].T)
    np.testing.assert_array_equal(
        module(inputs), model.logits(model.init_params(cfg, seed=5), inputs, cell="cifg")
    )


@pytest.mark.parametrize(
    ("words", "embed", "hidden", "shared", "millions"),
    [(10_000, 96, 670, True, 2.6), (10_000, 96, 670, False, 3.5), (4000, 96, 256, False, 1.07)],
)
def test_sizes_of_the_papers(words, embed, hidden, shared, millions):
    cfg = model.ModelConfig(
        num_tokens=words + 4, embedding_size=embed, hidden_size=hidden, shared_embeddings=shared
    )
    shapes = jax.eval_shape(lambda: model.init_params(cfg, seed=0))
    count = sum(np.prod(x.shape) for x in jax.tree.leaves(shapes))
    assert abs(count / 1e6 - millions) < 0.06


def test_padding_neither_adds_to_the_loss_nor_changes_it():
    params = some_params("cifg", False)
    rows = data.clients()[3]
    wider = np.pad(rows, ((0, 3), (0, 4)))
    loss = jax.jit(model.loss, static_argnames="cell")
    losses = [
        loss(params, jnp.asarray(r[:, :-1].T), jnp.asarray(r[:, 1:].T), cell="cifg") for r in (rows, wider)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    nothing = jnp.zeros((7, 4), jnp.int32)
    assert float(loss(params, nothing, nothing, cell="cifg")) == 0


@pytest.mark.parametrize(("cell", "shared"), CELLS)
def test_a_packed_step_is_a_plain_step(cell, shared):
    params = some_params(cell, shared)
    rng = np.random.default_rng(4)
    lengths = [[], [3], [6, 6, 6, 6], [0, 1, 2, 3, 4, 5, 6], list(rng.integers(0, 7, 16)), [6] * 16, [1] * 9]
    step = jax.jit(packed.sgd_step, static_argnames="cell")
    plain = jax.jit(jax.value_and_grad(model.loss), static_argnames="cell")
    space = None
    for row_lengths in lengths:
        rows = np.array([data.sentence(rng, n) for n in row_lengths], np.int32).reshape(-1, data.WIDTH)
        packs = batches.pack_round(
            [0], [rows], batch_size=16, max_examples=100, chunk_size=1, width=data.WIDTH
        ).store
        batch = batches.Packed(*(jnp.asarray(x[0]) for x in packs))
        padded = np.zeros((16, data.WIDTH), np.int32)
        padded[: len(rows)] = rows
        loss, grads = plain(params, padded[:, :-1].T, padded[:, 1:].T, cell=cell)
        # The buffers of one batch are handed to the next, as a client does.
        space = packed.scratch(params, packs) if space is None else space
        new, space, got = step(params, space, batch, learning_rate=0.5, cell=cell)
        np.testing.assert_allclose(got, loss, rtol=1e-5, atol=1e-6)
        for name, value in params.items():
            np.testing.assert_allclose(
                new[name], value - 0.5 * grads[name], rtol=1e-5, atol=2e-6, err_msg=f"{name} {row_lengths}"
            )


def test_sizes_that_make_no_model_are_refused():
    with pytest.raises(ValueError, match="hidden_size must be at least 1"):
        config("cifg", False, hidden=0)
    with pytest.raises(ValueError, match="cell must be one of"):
        config("gru", False)
