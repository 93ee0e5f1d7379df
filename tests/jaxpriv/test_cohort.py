"""Cohort sums: a plain loop in float64 says what is right; chunks, order, padding and devices change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpriv import cohort, keys, sharding
from tests.oracles import cohort as oracle

DIM = 40


def identity(params, data, key):
    """The client's data is its update."""
    del params, key
    return {"w": data["x"]}, {"one": jnp.float32(1.0)}


def make(seed=0, clients=13):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((clients, DIM)).astype(np.float32) * rng.choice(
        [0.02, 0.2, 5.0], (clients, 1)
    ).astype(np.float32)
    examples = rng.integers(0, 6, clients)
    examples[0] = 0
    x[1, 3], x[2, 0] = np.nan, np.inf
    examples[1:3] = 2
    return x, examples


def run(
    x,
    examples,
    *,
    chunk_size,
    ids=None,
    num_clients=None,
    mesh=None,
    client_fn=identity,
    key=None,
    **settings,
):
    settings = {"max_norm": 1.0, "estimate": 0.5} | settings
    ids = np.arange(len(x)) if ids is None else ids
    arranged = cohort.arrange(ids, examples, {"x": x}, chunk_size=chunk_size, num_clients=num_clients)
    params = {"w": jnp.zeros(x.shape[1])}
    if mesh is not None:
        arranged, params = sharding.place_cohort(arranged, mesh), sharding.replicate(params, mesh)
    call = jax.jit(lambda p, c: cohort.clipped_sum(client_fn, p, c, key, **settings))
    return call(params, jax.tree.map(jnp.asarray, arranged))


@pytest.mark.parametrize(
    "layout", ["one", "three", "all", "padded", "shuffled", "8 devices", "8 devices, wide"]
)
def test_equals_the_loop_whatever_the_layout(layout):
    x, examples = make()
    want, bits, empty, bad = oracle.clipped_sum(x, examples, max_norm=1.0, estimate=0.5)
    settings = {
        "one": {"chunk_size": 1},
        "three": {"chunk_size": 3},
        "all": {"chunk_size": len(x)},
        "padded": {"chunk_size": 4, "num_clients": 30},
        "shuffled": {"chunk_size": 1},
        "8 devices": {"chunk_size": 8, "mesh": sharding.make_mesh()},
        "8 devices, wide": {"chunk_size": 16, "mesh": sharding.make_mesh(), "num_clients": 40},
    }[layout]
    if layout == "shuffled":
        order = np.random.default_rng(1).permutation(len(x))
        x, examples = x[order], examples[order]
    sums, info = run(x, examples, **settings)
    # 2^-16 is how far inside the ball long updates are put.
    np.testing.assert_allclose(sums.update["w"], want, rtol=3e-5, atol=3e-5)
    assert float(sums.below) == bits
    assert (int(info.num_present), int(info.num_empty), int(info.num_non_finite)) == (len(x), empty, bad)
    assert int(info.num_examples) == examples.sum()
    assert float(info.metrics["one"]) == len(x) - empty - bad
    # Against the same sum one client at a time: rounding only.
    one, _ = run(*make(), chunk_size=1)
    scale = np.linalg.norm(one.update["w"])
    assert np.linalg.norm(sums.update["w"] - one.update["w"]) <= 1e-6 * scale


def test_nan_and_inf_count_as_zero_vectors_and_are_told_to_the_operator():
    """Of [3, 4], [nan, 1], [inf, 0] and [0, 0] with C = 1 the sum is [0.6, 0.8] (AC08)."""
    x = np.array([[3, 4], [np.nan, 1], [np.inf, 0], [0, 0]], np.float32)
    for chunk_size in 1, 4:
        sums, info = run(x, np.ones(4, int), chunk_size=chunk_size)
        np.testing.assert_allclose(sums.update["w"], [0.6, 0.8], rtol=2e-5)
        assert (int(info.num_non_finite), int(info.num_present), int(info.num_clipped)) == (2, 4, 1)
        # [3, 4] is above the estimate, the bad ones always are, [0, 0] is not.
        assert float(sums.below) == -1.0


def test_clients_are_clipped_one_by_one_not_their_mean():
    """The mean of [10, 0] and [0, 0] is [0.5, 0] with C = 1, not [1, 0] (AC11)."""
    sums, _ = run(np.array([[10, 0], [0, 0]], np.float32), np.ones(2, int), chunk_size=2)
    np.testing.assert_allclose(sums.update["w"] / 2, [0.5, 0.0], rtol=2e-5)


@pytest.mark.parametrize("devices", [1, 8])
def test_clients_that_differentiate_are_clipped_one_by_one_on_any_number_of_devices(devices):
    def client(params, data, key):
        del key
        return jax.grad(lambda p: jnp.sum(p["w"] * data["x"]))(params), {}

    x = np.eye(8, dtype=np.float32) * 10
    mesh = sharding.make_mesh(jax.devices()[:devices])
    sums, info = run(x, np.ones(8, int), chunk_size=8, mesh=mesh, client_fn=client)
    np.testing.assert_allclose(sums.update["w"], np.ones(8), rtol=2e-5)
    assert int(info.num_clipped) == 8


def test_randomness_follows_the_client_not_its_place():
    def draws(params, data, key):
        del params
        return {"w": data["x"] * jax.random.uniform(key, (DIM,))}, {}

    x = np.full((3, DIM), 0.01, np.float32)
    key = keys.stream(jax.random.key(5), "clients")
    runs = [
        run(x, np.ones(3, int), ids=np.array(ids), chunk_size=chunk, client_fn=draws, key=key, num_clients=5)[
            0
        ]
        for ids, chunk in (([7, 8, 9], 1), ([9, 7, 8], 1), ([8, 9, 7], 2))
    ]
    for other in runs[1:]:
        np.testing.assert_allclose(other.update["w"], runs[0].update["w"], rtol=1e-6)
    other = run(x, np.ones(3, int), ids=np.array([7, 8, 10]), chunk_size=1, client_fn=draws, key=key)[0]
    assert not np.allclose(other.update["w"], runs[0].update["w"], rtol=1e-3)


def test_a_round_of_empty_clients_and_one_of_nobody():
    x = np.ones((3, DIM), np.float32)
    sums, info = run(x, np.zeros(3, int), chunk_size=2)
    assert not np.asarray(sums.update["w"]).any()
    assert float(sums.below) == -1.5
    assert int(info.num_empty) == 3
    sums, info = run(x[:0], np.zeros(0, int), chunk_size=2, num_clients=4)
    assert not np.asarray(sums.update["w"]).any()
    assert float(sums.below) == 0
    assert int(info.num_present) == 0


def test_equal_weights_unless_there_is_no_bound():
    """One example and a million, both updates of norm 1 = C: they weigh the same (AC16)."""
    x = np.stack([np.eye(DIM, dtype=np.float32)[0], np.eye(DIM, dtype=np.float32)[1]])
    examples = np.array([1, 1_000_000])
    sums, _ = run(x, examples, chunk_size=1)
    np.testing.assert_allclose(sums.update["w"][:2], 1.0, rtol=2e-5)
    with pytest.raises(ValueError, match="weigh_by_examples"):
        run(x, examples, chunk_size=1, weigh_by_examples=True)
    sums, info = run(x, examples, chunk_size=1, weigh_by_examples=True, max_norm=None)
    np.testing.assert_allclose(sums.update["w"][:2], [1, 1_000_000])
    assert int(info.num_examples) == 1_000_001


def test_sums_over_thousands_of_clients_stay_exact_to_a_millionth():
    x = np.random.default_rng(3).uniform(0, 0.1, (5000, 4)).astype(np.float32)
    want = x.astype(np.float64).sum(0)
    for chunk_size in 1, 100:
        sums, _ = run(x, np.ones(5000, int), chunk_size=chunk_size)
        np.testing.assert_allclose(sums.update["w"], want, rtol=1e-6)


def test_refusals():
    with pytest.raises(ValueError, match="chunk_size"):
        cohort.arrange([1], [1], {}, chunk_size=0)
    with pytest.raises(ValueError, match="client ids"):
        cohort.arrange(np.array([2**31]), [1], {}, chunk_size=1)
    with pytest.raises(ValueError, match="3 clients do not fit"):
        cohort.arrange([1, 2, 3], [1, 1, 1], {}, chunk_size=1, num_clients=2)
    with pytest.raises(ValueError, match="structure"):
        run(np.ones((2, 2), np.float32), [1, 1], chunk_size=1, client_fn=lambda p, d, k: (d["x"], {}))
