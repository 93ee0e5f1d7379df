"""The Transformer: cached steps, padding, keys, positions; its batches and its loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainers.translation import batches, train
from trainers.translation import model as models
from trainers.translation.config import ModelConfig

TINY = dict(vocabulary_size=60, dim=16, num_heads=2, ffn_dim=32, encoder_layers=2, decoder_layers=2)


def tiny(seed=0, **changes):
    config = ModelConfig(**{**TINY, **changes})
    graphdef, shapes = models.abstract(config)
    rng = np.random.default_rng(
        seed
    )  # jax's own initialisation, drawn leaf by leaf, takes seconds to compile

    def draw(leaf):
        x = rng.normal(size=leaf.shape).astype(np.float32)
        return jnp.asarray(x * leaf.shape[-1] ** -0.5 if len(leaf.shape) > 1 else 1 + 0.1 * x)

    return graphdef, jax.tree.map(draw, shapes)


@functools.partial(jax.jit, static_argnums=0)
def teacher_forced(graphdef, params, source, inputs):
    model = models.merge(graphdef, params)
    return model.decode(model.encode(source), source != models.PAD, inputs)


loss = jax.jit(train.loss_fn, static_argnums=0, static_argnames="smoothing")


def random_example(rng, source, target):
    return batches.Example(
        rng.integers(3, 60, source).astype(np.int32), rng.integers(3, 60, target).astype(np.int32)
    )


@pytest.mark.parametrize("key", ["output", "ffn_input"])
def test_cached_steps_equal_teacher_forcing(key):
    graphdef, params = tiny(key=key)
    rng = np.random.default_rng(0)
    batch = batches.make_batch([random_example(rng, 5, 7), random_example(rng, 3, 2)])
    hidden, keys = teacher_forced(graphdef, params, batch.source, batch.inputs)

    @jax.jit
    def start(params):
        model = models.merge(graphdef, params)
        return model.start(model.encode(batch.source), batch.source != models.PAD, 10)

    @jax.jit
    def step(params, cache, pieces, position):
        return models.merge(graphdef, params).step(cache, pieces, position)

    cache = start(params)
    for position in range(batch.inputs.shape[1]):
        cache, h, k = step(params, cache, jnp.asarray(batch.inputs[:, position]), jnp.int32(position))
        np.testing.assert_allclose(h, hidden[:, position], atol=2e-6)
        np.testing.assert_allclose(k, keys[:, position], atol=2e-6)
    assert (np.abs(np.asarray(keys - hidden)).max() > 0.01) == (key == "ffn_input")


def test_padding_changes_nothing():
    graphdef, params = tiny()
    rng = np.random.default_rng(1)
    example = random_example(rng, 5, 6)
    small = batches.make_batch([example], length=8)
    large = batches.make_batch([example, random_example(rng, 20, 22)], rows=4, length=32)
    a, _ = loss(graphdef, params, small, None, smoothing=0.1)
    alone = batches.Batch(*(leaf[:1] for leaf in large))
    b, count = loss(graphdef, params, alone, None, smoothing=0.1)
    assert count == 7
    assert a == pytest.approx(float(b), rel=1e-5)
    both, count = loss(graphdef, params, large, None, smoothing=0.1)
    assert count == 7 + 23
    assert both > a


def test_a_target_position_does_not_see_later_ones():
    graphdef, params = tiny()
    rng = np.random.default_rng(2)
    example = random_example(rng, 5, 7)
    changed = example._replace(target=np.concatenate([example.target[:4], example.target[4:] % 50 + 5]))
    keys = []
    for e in (example, changed):
        batch = batches.make_batch([e], length=12)
        keys.append(teacher_forced(graphdef, params, batch.source, batch.inputs)[1])
    np.testing.assert_array_equal(keys[0][0, :5], keys[1][0, :5])
    assert np.abs(keys[0][0, 5:8] - keys[1][0, 5:8]).max() > 1e-3


def test_smoothed_loss_is_its_formula():
    logits = jax.random.normal(jax.random.key(0), (1, 3, 5))
    targets = jnp.array([[4, 2, models.PAD]])
    total, count = train.smoothed_loss(logits, targets, 0.2)
    log_p = np.asarray(jax.nn.log_softmax(logits, -1))[0]
    expected = sum(0.8 * -log_p[t, y] + 0.2 * -log_p[t].mean() for t, y in ((0, 4), (1, 2)))
    assert count == 2
    assert total == pytest.approx(expected, rel=1e-5)


def test_dropout_keeps_the_mean_and_the_rate():
    x = jnp.ones((400, 400))
    out = np.asarray(models.dropout(x, 0.25, jax.random.key(3)))
    assert out.mean() == pytest.approx(1.0, abs=0.01)
    assert (out == 0).mean() == pytest.approx(0.25, abs=0.005)
    np.testing.assert_array_equal(models.dropout(x, 0.25, None), x)


def test_refusals():
    with pytest.raises(ValueError, match="num_heads must divide dim"):
        ModelConfig(**{**TINY, "num_heads": 3})
    with pytest.raises(ValueError, match="dropout"):
        ModelConfig(**TINY, dropout=1.0)
    with pytest.raises(ValueError, match="key must be"):
        ModelConfig(**TINY, key="middle")


def test_an_epoch_uses_every_pair_once_and_concatenates_some():
    rng = np.random.default_rng(4)
    examples = [random_example(rng, *rng.integers(1, 20, 2)) for _ in range(500)]
    examples.append(random_example(rng, 150, 10))
    plan = batches.epoch(examples, seed=0, number=0, batch_tokens=256, max_length=100)
    rows = [row for batch in plan for row in batch]
    assert sorted(i for row in rows for i in row) == list(range(500))  # the long one is left out
    joined = [row for row in rows if len(row) > 1]
    assert 100 <= sum(map(len, joined)) <= 160
    assert plan == batches.epoch(examples, seed=0, number=0, batch_tokens=256, max_length=100)
    assert plan != batches.epoch(examples, seed=0, number=1, batch_tokens=256, max_length=100)
    shapes = set()
    for batch in plan:
        arrays = batches.load(examples, batch, batch_tokens=256)
        shapes.add(arrays.source.shape)
        assert arrays.source.shape[1] in batches.BUCKETS
        for i, row in enumerate(batch):
            expected = np.concatenate([examples[j].target for j in row])
            np.testing.assert_array_equal(arrays.targets[i, : len(expected)], expected)
            assert arrays.targets[i, len(expected)] == models.END
            assert arrays.inputs[i, 0] == models.END
            np.testing.assert_array_equal(arrays.inputs[i, 1 : len(expected) + 1], expected)
    assert len(shapes) <= len(batches.BUCKETS)


def test_in_order_gives_every_example_at_its_index():
    rng = np.random.default_rng(5)
    examples = [random_example(rng, *rng.integers(0, 30, 2)) for _ in range(100)]
    seen = []
    for index, batch in batches.in_order(examples, batch_tokens=200):
        for row, i in enumerate(index):
            assert (batch.targets[row] != 0).sum() == len(examples[i].target) + 1
        assert (batch.targets[len(index) :] == 0).all()
        seen += list(index)
    assert sorted(seen) == list(range(100))


@pytest.mark.parametrize("causal", [False, True])
def test_long_rows_attend_in_parts_as_at_once(causal):
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(2, 2, 1100, 4)), jnp.float32) for _ in range(3))
    mask = jnp.asarray(rng.random((2, 1, 1, 1100)) < 0.9)
    mask = jnp.tril(jnp.ones((1100, 1100), bool))[None, None] if causal else mask
    whole = jax.jit(models._attend_at_once)(query, key, value, mask)
    np.testing.assert_allclose(jax.jit(models._attend)(query, key, value, mask), whole, atol=1e-6)
