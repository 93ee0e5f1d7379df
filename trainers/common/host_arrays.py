"""Leaves of a state as plain numpy arrays and back: what is written to disk or sent to another process."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_host(leaf: Any) -> np.ndarray:
    """A copy on the host (of a typed key its words), so that later donation of the buffer cannot reach it."""
    return np.array(jax.random.key_data(leaf) if is_key(leaf) else leaf, copy=True)


def from_host(value: np.ndarray, like: Any) -> Any:
    """The leaf again, of the kind of `like`: a typed key, a jax array or a numpy array."""
    if is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(like))
    return jnp.asarray(value) if isinstance(like, jax.Array) else value
