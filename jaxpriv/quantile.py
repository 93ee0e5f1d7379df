"""Track a quantile of client update norms, privately.

The estimate moves geometrically towards the norm that a fraction `target` of the clients' updates would not exceed
(Andrew et al. 2021, arXiv:1905.03871, section 3). Each client sends one bit, whether its norm lies within the current
*estimate* (not the clip norm in force, which may be frozen until the next restart: comparing with that drives the
estimate away exponentially), centred to +-1/2, so that replacing a client's message by zero moves the sum by 1/2.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Scalar = float | Float[Array, ""]


class QuantileState(NamedTuple):
    """What the next round needs. Releasable: it is an output of the mechanism.

    clip: current estimate, in the units of the update's L2 norm. step: rounds absorbed so far.
    """

    clip: Float[Array, ""]
    step: Int[Array, ""]


def init(clip: Scalar) -> QuantileState:
    """Starts at `clip`, a guess made without looking at the data.

    Raises:
      ValueError: a Python number that is not finite and positive.
    """
    if isinstance(clip, (int, float)) and not 0 < clip < float("inf"):
        raise ValueError(f"clip must be a finite number above 0, got {clip=}")
    return QuantileState(jnp.asarray(clip, jnp.float32), jnp.int32(0))


def bits(norms: Float[Array, "..."], present: Bool[Array, "..."], estimate: Scalar) -> Float[Array, "..."]:
    """Each client's centred bit, `1[norm <= estimate] - 1/2`; 0 for absent clients.

    A norm that is infinite or NaN (of an update that was zeroed) counts as above the estimate.
    """
    return jnp.where(present, jnp.where(norms <= estimate, 0.5, -0.5), 0.0)


def step(
    state: QuantileState,
    below: Float[Array, ""],
    noise: Float[Array, ""],
    *,
    target: Scalar,
    learning_rate: Scalar,
    cohort_size: int,
) -> tuple[QuantileState, Float[Array, ""]]:
    """Absorbs one round and returns `(state, noised_fraction)`.

    `estimate <- estimate * exp(-learning_rate * (noised_fraction - target))`.

    Args:
      below: sum over clients of `1[norm <= state.clip] - 1/2` (0 for absent ones);
        zeroing one client's message moves it by at most 1/2.
      noise: this round's noise for `below`, from the same mechanism as the updates' (a count).
      target: quantile, between 0 and 1.
      learning_rate: geometric step, 0.2 is usual.
      cohort_size: public number of clients per round, not the realised one.

    Raises:
      ValueError: a Python `target` outside (0, 1) or `cohort_size` below 1.
    """
    if isinstance(target, (int, float)) and not 0 < target < 1:
        raise ValueError(f"target must be between 0 and 1, got {target=}")
    if cohort_size < 1:
        raise ValueError(f"cohort_size must be at least 1, got {cohort_size=}")
    fraction = (below + noise) / cohort_size + 0.5
    clip = state.clip * jnp.exp(-learning_rate * (fraction - target))
    # Noise may push the estimate far; keep it a usable norm whatever happens.
    clip = jnp.clip(clip, 1e-30, 1e30)
    return QuantileState(clip, state.step + 1), fraction
