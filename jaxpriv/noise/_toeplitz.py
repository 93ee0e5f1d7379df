"""Matrix mechanisms streamed: increments C^-1 w for a lower-triangular strategy C.

Row by row, z_t = (w_t - sum_{j >= 1} c_j z_{t-j}) / c_0. Coefficients are float64 on the host and rounded
to float32 once, where they are applied; state is float32. With restarts C is block-diagonal: nothing before
a restart enters the noise after it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree

from jaxpriv import sampling
from jaxpriv._words import once
from jaxpriv.noise._base import Draw, Layout, NoiseMechanism, Restarts, block_diagonal, scale


class ToeplitzState(NamedTuple):
    """key: secret. step: rounds so far. stddev: latched in the first round of the current segment.

    buffers: what the next rounds need of earlier noise, in units of `stddev`: for a BLT sums of decayed
      noise, one tree a buffer; for a banded strategy the noise of the last rounds, round t in slot t mod
      (bands - 1) of the first axis.
    """

    key: Key[Array, ""]
    step: Int[Array, ""]
    stddev: Float[Array, ""]
    buffers: tuple[PyTree[Float[Array, "..."]], ...]
    layout: Layout


def blt(
    strategy: Any, restarts: Sequence[int] = (), *, draw: Draw = sampling.fused_normal_like
) -> NoiseMechanism:
    """Buffered linear Toeplitz noise: half the tree's noise or less for a few copies of the model.

    C has c_0 = 1 and c_j = sum_i omega_i theta_i^(j - 1) (Dvijotham et al. 2024, arXiv:2404.16706): one draw
    and one pass over the buffers a round.

    Args:
      strategy: anything with vectors `theta` (decays, in (-1, 1)) and `omega` (output scales), one entry a
        buffer.
      restarts: strictly increasing; a fresh block of the strategy starts after that many rounds.
      draw: `(key, like) -> standard normals`; tests put known numbers in its place.

    Raises:
      ValueError: vectors of unequal length, empty, not finite, or a decay outside (-1, 1).
    """
    theta, omega = _vector("theta", strategy.theta), _vector("omega", strategy.omega)
    if len(theta) != len(omega) or (np.abs(theta) >= 1).any():
        given = f"theta={theta.tolist()}, omega={omega.tolist()}"
        raise ValueError(f"a BLT needs as many theta, all in (-1, 1), as omega, got {given}")
    segments = Restarts(restarts)

    def init(key: Key[Array, ""], like: PyTree) -> ToeplitzState:
        layout = Layout(like)
        buffers = tuple(layout.zeros() for _ in theta)
        return ToeplitzState(key, jnp.int32(0), jnp.float32(0), buffers, layout)

    def step(state: ToeplitzState, *, stddev) -> tuple[ToeplitzState, PyTree]:
        first = segments.starts(state.step)
        stddev = jnp.where(first, jnp.float32(stddev), state.stddev)
        # A restart forgets: zero coefficients on what the buffers still hold.
        output = [jnp.where(first, 0, jnp.float32(o)) for o in omega]
        decay = [jnp.where(first, 0, jnp.float32(t)) for t in theta]
        key = jax.random.fold_in(state.key, state.step)

        def correlate(fresh, *buffers):
            # One product a sum, so that fusing them (or not) cannot round differently in another layout.
            for coefficient, buffer in zip(output, buffers):
                fresh = fresh - coefficient * buffer
            return fresh

        def body(buffers):
            noise = jax.tree.map(correlate, draw(key, state.layout.structs()), *buffers)
            pairs = zip(decay, buffers)
            return tuple(jax.tree.map(lambda b, z, d=d: d * b + z, b, noise) for d, b in pairs), noise

        def never(buffers):
            return buffers, state.layout.zeros()

        buffers, noise = once(state.step, body, state.buffers, never=never)
        return ToeplitzState(state.key, state.step + 1, stddev, buffers, state.layout), scale(noise, stddev)

    def column(num_rounds: int) -> np.ndarray:
        powers = theta.astype(np.float32).astype(np.float64) ** np.arange(max(num_rounds - 1, 0))[:, None]
        return np.concatenate([[1.0], powers @ omega.astype(np.float32).astype(np.float64)])[:num_rounds]

    return NoiseMechanism(
        init, step, lambda state: segments.starts(state.step), lambda n: _inverse_matrix(column, segments, n)
    )


def banded(
    strategy: Any, restarts: Sequence[int] = (), *, draw: Draw = sampling.fused_normal_like
) -> NoiseMechanism:
    """Noise of a banded Toeplitz strategy, for one copy of the model a band beyond the first.

    Args:
      strategy: anything with a vector `coefficients`, the first column of C up to its last band, or that
        vector.
      restarts, draw: as in `blt`.

    Raises:
      ValueError: coefficients that are empty or not finite, or a first one that is not positive.
    """
    coefficients = _vector("coefficients", getattr(strategy, "coefficients", strategy))
    if coefficients[0] <= 0:
        raise ValueError(f"coefficients must begin with a positive number, got {coefficients[0]}")
    segments, bands = Restarts(restarts), len(coefficients)

    def init(key: Key[Array, ""], like: PyTree) -> ToeplitzState:
        layout = Layout(like)
        return ToeplitzState(key, jnp.int32(0), jnp.float32(0), (layout.zeros(bands - 1),), layout)

    def step(state: ToeplitzState, *, stddev) -> tuple[ToeplitzState, PyTree]:
        place = segments.place(state.step)
        stddev = jnp.where(place.before == 0, jnp.float32(stddev), state.stddev)
        key = jax.random.fold_in(state.key, state.step)
        slots = jnp.arange(bands - 1)
        # The round that a slot holds lies `age` rounds back; slots of an earlier segment count for nothing.
        age = (state.step - 1 - slots) % max(bands - 1, 1) + 1
        weight = jnp.where(age <= place.before, jnp.asarray(coefficients, jnp.float32)[age], 0)

        def correlate(fresh, buffer):
            for slot in range(bands - 1):
                fresh = fresh - weight[slot] * buffer[slot]
            return fresh / jnp.float32(coefficients[0])

        def body(buffers):
            return jax.tree.map(correlate, draw(key, state.layout.structs()), buffers)

        (buffers,) = state.buffers
        noise = once(state.step, body, buffers)
        if bands > 1:
            slot = state.step % (bands - 1)
            buffers = jax.tree.map(lambda b, z: b.at[slot].set(z), buffers, noise)
        return ToeplitzState(state.key, state.step + 1, stddev, (buffers,), state.layout), scale(
            noise, stddev
        )

    def column(num_rounds: int) -> np.ndarray:
        given = coefficients[:num_rounds].astype(np.float32).astype(np.float64)
        return np.concatenate([given, np.zeros(num_rounds - len(given))])

    return NoiseMechanism(
        init, step, lambda state: segments.starts(state.step), lambda n: _inverse_matrix(column, segments, n)
    )


def _vector(name, values):
    vector = np.asarray(values, np.float64)
    if vector.ndim != 1 or not vector.size or not np.isfinite(vector).all():
        raise ValueError(f"{name} must be a non-empty vector of finite numbers, got {values!r}")
    return vector


def _inverse_matrix(column, segments, num_rounds):
    """C^-1 with the blocks of the restarts; a lower-triangular Toeplitz inverse is Toeplitz again."""
    blocks = []
    for length in segments.lengths(num_rounds):
        c = column(length)
        inverse = np.zeros(length)
        for t in range(length):
            inverse[t] = ((t == 0) - c[1 : t + 1] @ inverse[:t][::-1]) / c[0]
        index = np.subtract.outer(np.arange(length), np.arange(length))
        blocks.append(np.where(index >= 0, inverse[np.maximum(index, 0)], 0.0))
    return block_diagonal(blocks)
