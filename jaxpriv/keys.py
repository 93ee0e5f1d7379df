"""Named key streams: root, stream, round, client; by identity, never by position.

A new consumer takes a new stream name and shifts nobody else's randomness; shuffling or padding a
cohort changes no client's. Every id is used in full: 64 bits go into the key for ids and 64 bits of
a digest for names, where `jax.random.fold_in` alone would keep 32.

A key holds 64 bits (JAX's threefry). Secret roots (noise, selection) come from the operating
system's entropy, public ones (schedules, initial values, directions) from `--seed`; the two never
share a root.
"""

import hashlib
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, UInt32

WORD = 0xFFFFFFFF


def root(seed: int) -> Key[Array, ""]:
    """The key of `seed`, all 64 bits of it: different seeds give different keys.

    Equals `jax.random.key(seed)` below 2**32, where JAX without 64-bit mode keeps every bit.

    Raises:
      ValueError: a negative seed, or one of more than 64 bits (a key holds no more).

    >>> bool((jax.random.key_data(root(1)) == jax.random.key_data(root(1 + 2**32))).all())
    False
    """
    seed = operator.index(seed)
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be from 0 to 2**64 - 1 (a key holds 64 bits), got {seed=}")
    data = np.array([seed >> 32, seed & WORD], np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(data), impl="threefry2x32")


def stream(key: Key[Array, ""], name: str) -> Key[Array, ""]:
    """The key of the consumer called `name`: 64 bits of the name's SHA-256 are folded in."""
    digest = hashlib.sha256(name.encode()).digest()
    high, low = int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:8], "big")
    return _fold(key, high, low)


def for_round(
    key: Key[Array, ""], number: int | np.integer | Int[Array, ""] | UInt32[Array, ""]
) -> Key[Array, ""]:
    """The key of round `number` (an int below 2**64, or a traced integer of 32 bits)."""
    return fold(key, number)


def for_client(
    key: Key[Array, ""], client_id: int | np.integer | Int[Array, ""] | UInt32[Array, ""]
) -> Key[Array, ""]:
    """The key of one client, by its id (an int below 2**64, or a traced integer of 32 bits)."""
    return fold(key, client_id)


def fold(
    key: Key[Array, ""], number: int | np.integer | Int[Array, ""] | UInt32[Array, ""]
) -> Key[Array, ""]:
    """Folds in all 64 bits of `number`; a traced 32-bit integer counts as one with upper half zero.

    Raises:
      ValueError: a negative int or one of more than 64 bits.
    """
    if isinstance(number, jax.Array):
        return _fold(key, jnp.uint32(0), number.astype(jnp.uint32))
    number = operator.index(number)
    if not 0 <= number < 2**64:
        raise ValueError(f"a number folded into a key must be from 0 to 2**64 - 1, got {number}")
    return _fold(key, number >> 32, number & WORD)


def _fold(key, high, low):
    return jax.random.fold_in(jax.random.fold_in(key, high), low)
