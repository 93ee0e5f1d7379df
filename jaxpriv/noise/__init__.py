"""Correlated noise behind one interface: the running sum of the noised rounds is a private prefix sum.

    mechanism = noise.tree(restarts=(128,))
    state = mechanism.init(secret_key, params)
    state, z = mechanism.step(state, stddev=noise_multiplier * max_norm)   # add z to the sum of clipped
    updates

Equivalently the releases are A (x + C^-1 w), w independent Gaussians and C a strategy matrix whose columns
give the sensitivity; `matrix(mechanism, num_rounds)` is the N with the rounds' noises N w.
"""

import numpy as np
from jaxtyping import Float

from jaxpriv.noise._base import NoiseMechanism, independent
from jaxpriv.noise._toeplitz import banded, blt
from jaxpriv.noise._tree import tree, tree_reduced

__all__ = ["NoiseMechanism", "banded", "blt", "independent", "matrix", "tree", "tree_reduced"]


def matrix(mechanism: NoiseMechanism, num_rounds: int) -> Float[np.ndarray, "rounds gaussians"]:
    """N with the noises of rounds 0, ..., num_rounds - 1 equal to N w; their covariance is N N^T.

    In units of one underlying Gaussian's standard deviation, float64. Prefix noise is `cumsum(N, 0)`.

    Raises:
      ValueError: fewer than 0 rounds, or more than the mechanism has room for.
    """
    if num_rounds < 0:
        raise ValueError(f"num_rounds must not be negative, got {num_rounds=}")
    return mechanism.matrix(num_rounds)
