"""Key streams: every bit of a seed or an id counts, and identity, not position, decides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpriv import keys


def data(key):
    return tuple(np.asarray(jax.random.key_data(key)).reshape(-1).tolist())


def test_seeds_beyond_32_bits_are_used_in_full():
    seeds = [0, 1, 1 + 2**32, 2**32 - 1, 2**63, 2**64 - 1, 5 * 2**32]
    assert len({data(keys.root(seed)) for seed in seeds}) == len(seeds)
    assert data(keys.root(12345)) == data(jax.random.key(12345))


@pytest.mark.parametrize("seed", [-1, 2**64, -(2**40)])
def test_seeds_that_a_key_cannot_hold_are_refused(seed):
    with pytest.raises(ValueError, match=r"seed must be from 0 .*" + str(seed)):
        keys.root(seed)


def test_a_float_is_no_seed():
    with pytest.raises(Exception, match=r"float|int"):
        keys.root(1.5)


def test_streams_rounds_and_clients_all_differ():
    root = keys.root(3)
    noise, selection = keys.stream(root, "noise"), keys.stream(root, "selection")
    derived = [root, noise, selection]
    derived += [keys.for_round(noise, t) for t in (0, 1, 2, 2**32, 2**32 + 1)]
    derived += [keys.for_client(keys.for_round(noise, 1), c) for c in (0, 1, 2**40, 2**40 + 1)]
    assert len({data(key) for key in derived}) == len(derived)
    assert data(keys.stream(keys.root(3), "noise")) == data(noise)


def test_traced_numbers_give_the_same_keys_as_ints():
    key = keys.root(9)
    traced = jax.jit(keys.for_round)(key, jnp.int32(17))
    assert data(traced) == data(keys.for_round(key, 17)) == data(keys.for_round(key, np.int64(17)))
    by_vector = jax.vmap(keys.for_client, (None, 0))(key, jnp.arange(5))
    assert data(by_vector[3]) == data(keys.for_client(key, 3))


@pytest.mark.parametrize("number", [-1, 2**64])
def test_numbers_of_no_key_are_refused(number):
    with pytest.raises(ValueError, match="from 0 to"):
        keys.for_client(keys.root(0), number)
