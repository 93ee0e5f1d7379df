"""Noise mechanisms: exact covariances, restarts and completion, one set of laws for all."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxpriv import noise
from tests.oracles import noise as twin


class Blt:
    theta = np.array([0.97, 0.6, 0.2])
    omega = np.array([0.04, 0.1, 0.3])


BANDS = np.array([1.0, 0.5, 0.375, 0.3125, 0.25])
ROUNDS = 22
MECHANISMS = {
    "independent": noise.independent(),
    "tree": noise.tree(),
    "tree, restarts": noise.tree(restarts=(5, 6, 13)),
    "tree, completion": noise.tree(restarts=(5, 6, 13), completion=True),
    "tree_reduced": noise.tree_reduced(ROUNDS),
    "tree_reduced, restarts": noise.tree_reduced(ROUNDS, restarts=(5, 6, 13)),
    "tree_reduced, completion": noise.tree_reduced(ROUNDS, restarts=(5, 6, 13), completion=True),
    "blt": noise.blt(Blt),
    "blt, restarts": noise.blt(Blt, restarts=(5, 6, 13)),
    "banded": noise.banded(BANDS),
    "banded, restarts": noise.banded(BANDS, restarts=(5, 6, 13)),
    "banded, one band": noise.banded(np.ones(1)),
}
every_mechanism = pytest.mark.parametrize("name", MECHANISMS)
# One of each kind, with all that it can do: the laws below cost a compilation or two each.
each_kind = pytest.mark.parametrize(
    "name",
    ["independent", "tree, completion", "tree_reduced, completion", "blt, restarts", "banded, restarts"],
)
LIKE = {"a": jnp.zeros(64), "b": jnp.zeros((8, 8))}


def run(mechanism, key, like, rounds, stddev=1.0):
    """The noise of each round, as a scan."""
    step = functools.partial(mechanism.step, stddev=stddev)
    return jax.lax.scan(lambda state, _: step(state), mechanism.init(key, like), None, rounds)[1]


@functools.cache
def runner(name):
    return jax.jit(lambda key: run(MECHANISMS[name], key, LIKE, 9, stddev=0.5))


def as_numpy(tree):
    return jax.tree.map(np.asarray, tree)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, as_numpy(a), as_numpy(b))


@functools.cache
def increments(name):
    go = jax.jit(lambda key: run(MECHANISMS[name], key, jnp.zeros(100_000), ROUNDS))
    return np.asarray(go(jax.random.key(11)), np.float64)


@every_mechanism
def test_covariance_is_the_matrix_and_no_other(name):
    """Entries of X X^T / d have standard deviation at most sqrt(2 S_ii S_jj / d); 5 of them are allowed."""
    x, expected = increments(name), noise.matrix(MECHANISMS[name], ROUNDS)
    expected = expected @ expected.T
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)) * 2 / x.shape[1])
    assert (np.abs(x @ x.T / x.shape[1] - expected) < 5 * scale).all()
    for wrong in (0.97, 1.03):
        assert (np.abs((wrong * x) @ (wrong * x).T / x.shape[1] - expected) > 5 * scale).any()
    # Each round is Gaussian, not only of the right variance.
    for row, variance in zip(x, np.diag(expected)):
        assert stats.kstest(row[:20_000] / np.sqrt(variance), "norm").pvalue > 1e-4


def test_covariances_differ_between_mechanisms():
    """So that agreement with the matrix says something."""
    seen = [noise.matrix(m, ROUNDS) for m in MECHANISMS.values()]
    covariances = {np.round(n @ n.T, 6).tobytes() for n in seen}
    assert len(covariances) == len(MECHANISMS) - 1  # one band is independent noise


@pytest.mark.parametrize("completion", [False, True])
@pytest.mark.parametrize("restarts", [(), (1,), (8,), (5, 6, 13), (3, 11, 20)])
def test_tree_matrix_counts_common_nodes(restarts, completion):
    n = noise.matrix(noise.tree(restarts, completion), ROUNDS)
    np.testing.assert_allclose(n @ n.T, twin.tree_covariance(ROUNDS, restarts, completion), atol=1e-12)


def test_tree_reduced_has_the_variances_of_estimation_from_below():
    n = noise.matrix(noise.tree_reduced(300), 300)
    prefix = (np.cumsum(n, 0) ** 2).sum(1)
    np.testing.assert_allclose(prefix, [twin.reduced_prefix_variance(t) for t in range(1, 301)], rtol=1e-12)
    plain = (np.cumsum(noise.matrix(noise.tree(), 300), 0) ** 2).sum(1)
    assert plain[255] == 1
    assert prefix[255] == pytest.approx(256 / 511)


@pytest.mark.parametrize("restarts", [(), (5, 6, 13)])
def test_strategy_matrices_are_inverses(restarts):
    column = twin.blt_column(np.float32(Blt.theta).astype(float), np.float32(Blt.omega).astype(float), ROUNDS)
    for mechanism, c in ((noise.blt(Blt, restarts), column), (noise.banded(BANDS, restarts), BANDS)):
        n = noise.matrix(mechanism, ROUNDS)
        np.testing.assert_allclose(n @ n.T, twin.strategy_covariance(c, ROUNDS, restarts), atol=1e-10)


def test_prefix_noise_of_released_nodes_at_a_restart():
    """Every node's noise 1, a restart after every 5 rounds: nothing of a closed tree is dropped (AC12)."""

    def ones(key, like):
        return jax.tree.map(lambda leaf: jnp.ones(leaf.shape), like)

    for completion, expected in (
        (False, [1, 1, 2, 1, 2, 3, 3, 4, 3, 4, 5, 5, 6, 5, 6]),
        (True, [1, 1, 2, 1, 1, 2, 2, 3, 2, 2, 3, 3, 4, 3, 3]),
    ):
        mechanism = noise.tree(restarts=(5, 10, 15), completion=completion, draw=ones)
        rounds = run(mechanism, jax.random.key(0), jnp.zeros(3), 15)
        np.testing.assert_array_equal(np.cumsum(rounds, 0), np.outer(expected, np.ones(3)))
    with pytest.raises(ValueError, match="restarts"):
        noise.tree(restarts=(5, 5))


def test_tree_noise_is_cancelled_exactly_not_statistically():
    """What leaves the prefix is the same numbers that entered it: only one node remains at a power of two."""
    x = increments("tree")
    prefix = np.cumsum(x, 0)
    for t in (2, 4, 8, 16):
        assert abs(prefix[t - 1].std() - 1) < 0.02
    assert np.abs(prefix[15] - prefix[16] + x[16]).max() < 1e-5
    assert abs(np.corrcoef(prefix[7], prefix[15])[0, 1]) < 0.02  # two different nodes


@each_kind
def test_stddev_is_latched_at_the_first_round_of_a_segment(name):
    mechanism = MECHANISMS[name]
    state, reference = (mechanism.init(jax.random.key(2), LIKE) for _ in range(2))
    step = jax.jit(lambda state, stddev: mechanism.step(state, stddev=stddev))
    latched_at = []
    for t in range(16):
        if bool(mechanism.starts_segment(state)):
            latched_at.append(t)
        state, noised = step(state, jnp.float32(1.0 + t))
        reference, unit = step(reference, jnp.float32(1.0))
        expected = jax.tree.map(lambda leaf, factor=1.0 + latched_at[-1]: factor * leaf, unit)
        assert_close(noised, expected, 2e-5 * 15)
    assert latched_at == (list(range(16)) if name == "independent" else [0, 5, 6, 13])


def test_stddev_is_latched_for_the_whole_run_without_restarts():
    for name in ("tree", "tree_reduced", "blt", "banded"):
        mechanism = MECHANISMS[name]
        state = mechanism.init(jax.random.key(0), LIKE)
        assert bool(mechanism.starts_segment(state))
        assert not mechanism.starts_segment(state._replace(step=jnp.int32(7)))


@each_kind
def test_laws(name):
    mechanism, key = MECHANISMS[name], lambda: jax.random.key(5)
    scanned = as_numpy(runner(name)(key()))
    assert_equal(scanned, runner(name)(key()))

    state = mechanism.init(key(), LIKE)
    kinds = [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
    for t in range(2):  # op by op, products and sums round apart; fused they may not
        state, eager = mechanism.step(state, stddev=0.5)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(state)] == kinds
        assert_close(eager, jax.tree.map(lambda leaf, t=t: leaf[t], scanned), 1e-6)

    batched = as_numpy(jax.jit(jax.vmap(lambda k: run(mechanism, k, LIKE, 9, stddev=0.5)))(pair()))
    for i, one in enumerate(pair()):
        assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], batched), runner(name)(one), 1e-6)


def pair():
    return jax.random.split(jax.random.key(6), 2)


def assert_close(a, b, atol):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=atol), as_numpy(a), as_numpy(b)
    )


@each_kind
def test_same_bits_on_one_and_eight_devices(name):
    mesh = jax.make_mesh((8,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.NamedSharding(mesh, jax.P(None, "clients"))
    sharded = jax.jit(lambda key: run(MECHANISMS[name], key, LIKE, 9, stddev=0.5), out_shardings=spread)(
        jax.random.key(4)
    )
    assert all(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(sharded))
    assert_equal(runner(name)(jax.random.key(4)), sharded)


@each_kind
def test_leaves_and_rounds_share_no_noise(name):
    flat = np.concatenate(
        [np.asarray(leaf).reshape(9, 64) for leaf in jax.tree.leaves(runner(name)(jax.random.key(3)))]
    )
    assert len(np.unique(flat)) > 0.999 * flat.size  # one key in two leaves or rounds would repeat 64 numbers


@pytest.mark.parametrize("name", ["independent", "tree", "tree_reduced", "blt", "banded"])
def test_leaves_of_one_size_have_each_their_own_noise(name):
    """Two leaves of shape (64,) and one of (8, 8), for which one key gives the same 64 numbers in JAX (AC13)."""
    same = [np.ravel(jax.random.normal(jax.random.key(3), shape)) for shape in ((64,), (8, 8))]
    np.testing.assert_array_equal(same[0], same[1])
    three = {"a": jnp.zeros(64), "b": jnp.zeros((8, 8)), "c": jnp.zeros(64)}
    mechanism = MECHANISMS[name]
    _, drawn = mechanism.step(mechanism.init(jax.random.key(3), three), stddev=1.0)
    for one, other in itertools.combinations([np.ravel(leaf) for leaf in jax.tree.leaves(drawn)], 2):
        assert (one != other).all()
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.5  # four standard deviations of 1 / sqrt(64)


def test_noise_of_the_mean_and_of_the_sum():
    """z = 1, C = 0.5, report goal 100, d = 100,000: 0.5 in the sum, 0.005 in the mean (AC14)."""
    state = noise.tree().init(jax.random.key(0), jnp.zeros(100_000))
    _, on_sum = noise.tree().step(state, stddev=1.0 * 0.5)
    assert np.std(on_sum) == pytest.approx(0.5, rel=0.01)
    assert np.std(on_sum / 100) == pytest.approx(0.005, rel=0.01)


def test_a_state_without_model_copies():
    state = noise.tree(restarts=(4,)).init(jax.random.key(0), jnp.zeros(10**6))
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == 3
    reduced = noise.tree_reduced(1000).init(jax.random.key(0), jnp.zeros(100))
    assert jax.tree.leaves(reduced.buffers)[0].shape == (10, 100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: noise.tree(restarts=(0, 3)), "restarts must be a strictly increasing list of positive"),
        (lambda: noise.tree(restarts=(4, 2)), "restarts must be"),
        (lambda: noise.tree_reduced(0), "num_rounds must be at least 1"),
        (lambda: noise.matrix(noise.tree_reduced(8), 9), "made for 8 rounds"),
        (lambda: noise.matrix(noise.tree(), -1), "num_rounds must not be negative"),
        (lambda: noise.banded([0.0, 1.0]), "begin with a positive number"),
        (lambda: noise.banded([1.0, float("nan")]), "finite numbers"),
        (lambda: noise.banded([]), "non-empty"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_blt_with_a_decay_that_does_not_decay_is_refused():
    class Wrong:
        theta = np.array([1.0])
        omega = np.array([0.5])

    with pytest.raises(ValueError, match=r"theta, all in \(-1, 1\)"):
        noise.blt(Wrong)
