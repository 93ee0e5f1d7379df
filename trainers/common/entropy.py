"""Secret randomness: noise and selection keys come from the operating system, never from `--seed`."""

import os

import jax
import jax.numpy as jnp
import numpy as np

from trainers.common.errors import InputError


def check_insecure_seed(seed: int | None) -> None:
    """Refuses an `--insecure-noise-seed` that no key holds whole (`jaxpriv.keys.root`); None is no such seed."""
    if seed is not None and not 0 <= seed < 2**64:
        raise InputError(f"--insecure-noise-seed must be from 0 to 2**64 - 1, got {seed}")


def secret_words() -> np.ndarray:
    """256 bits from the operating system, uint32 [8]. They live in the private checkpoint only."""
    return np.frombuffer(os.urandom(32), np.uint32).copy()


def key_from_words(words: np.ndarray) -> jax.Array:
    """A typed JAX key that depends on every bit of `words` (uint32 [8]).

    A threefry key holds 64 bits; the first two words make the key and the others are folded in one after
    another, so that the derivation is a chain of pseudo-random functions. An attacker's search space is
    the 64 bits of the final key: the statement's "computational" assumption.
    """
    words = np.asarray(words, np.uint32)
    if words.shape != (8,):
        raise ValueError(f"words must be uint32 [8], got shape {words.shape}")
    key = jax.random.wrap_key_data(jnp.asarray(words[:2]), impl="threefry2x32")
    for word in words[2:]:
        key = jax.random.fold_in(key, word)
    return key
