"""Who takes part when: devices with timers, availability and drop-out, and the limits the accountant is told.

Rounds are *released* rounds, the steps of the noise mechanism. A device's timer starts when it downloads the
model, whether or not its message then enters the sum: chosen for round t, it is next eligible in round
t + b, plus jitter, which only lengthens the wait. Where fewer than `report_goal` are there to choose from, nobody
downloads. An attempt that fewer than `report_goal` devices report to is abandoned: it takes no round number,
so no timer advances, but the timers of those who downloaded have started. (Gboard's rule; Xu et al. 2023,
arXiv:2305.18465, section 3.) A participation is counted when a message enters a released sum.

All randomness here is public. Which devices are eligible or report first must not depend on what their data
say: an assumption that every privacy statement prints.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jaxpriv import keys

Scalar = float | Float[Array, ""]
Count = int | np.integer | Int[Array, ""]
MOST = 2**30
_NEVER = -MOST


class State(NamedTuple):
    """One entry a device, indexed by its number.

    ready: first round in which it may be chosen again. last: its latest participation, hugely negative if
      none.
    count: participations so far. least_gap: least difference between two participations of one device so far.
    """

    ready: Int[Array, " devices"]
    last: Int[Array, " devices"]
    count: Int[Array, " devices"]
    least_gap: Int[Array, ""]


class Cohort(NamedTuple):
    """An attempt at a round.

    chosen: devices that download, the reporters first; places beyond `is_chosen` hold arbitrary numbers.
    reports: of the chosen, those whose message enters the sum: exactly `report_goal` of them, or none.
    released: whether the goal was met; if not the attempt is abandoned and everything in it discarded.
    breaks_limits: whether a reporter would come too early or too often. Never True for a cohort made by
      `select`; check it before anything is released.
    num_eligible: devices whose timer has run out, that are under their limit and available.
    """

    chosen: Int[Array, " chosen"]
    is_chosen: Bool[Array, " chosen"]
    reports: Bool[Array, " chosen"]
    released: Bool[Array, ""]
    breaks_limits: Bool[Array, ""]
    num_eligible: Int[Array, ""]


class Measured(NamedTuple):
    """Realised participation.

    min_separation: None while no device came twice. histogram[c]: devices that came c times.
    """

    min_separation: int | None
    max_participations: int
    histogram: list[int]


def init(num_devices: int) -> State:
    """Nobody has taken part, everybody is eligible."""
    if num_devices < 1:
        raise ValueError(f"num_devices must be at least 1, got {num_devices=}")
    fresh = jnp.zeros(num_devices, jnp.int32)
    return State(fresh, jnp.full(num_devices, _NEVER, jnp.int32), fresh.copy(), jnp.int32(2**30))


def most_participations(num_rounds: int, min_separation: int) -> int:
    """The most rounds one device can take part in: ceil(T / b), with b the least difference of round numbers.

    >>> most_participations(10, 3), most_participations(9, 3)
    (4, 3)
    """
    _positive(num_rounds=num_rounds, min_separation=min_separation)
    return -(-num_rounds // min_separation)


def check_capacity(
    num_devices: int, *, report_goal: int, num_rounds: int, min_separation: int, max_participations: int
) -> None:
    """Refuses limits under which the population cannot fill the rounds.

    Raises:
      ValueError: N < m min(b, T) or N k < m T, with the numbers and the nearest values that would do.
    """
    _positive(
        num_devices=num_devices,
        report_goal=report_goal,
        num_rounds=num_rounds,
        min_separation=min_separation,
        max_participations=max_participations,
    )
    n, m, t, b, k = num_devices, report_goal, num_rounds, min_separation, max_participations
    if n < m * min(b, t):
        raise ValueError(
            f"{n} devices cannot fill rounds of {m} at min_separation {b}: {m} x min({b}, {t}) = {m * min(b, t)} are "
            f"needed; lower min_separation to {n // m}, or report_goal to {n // min(b, t)}"
        )
    if n * min(k, -(-t // b)) < m * t:
        raise ValueError(
            f"{n} devices with at most {min(k, -(-t // b))} participations each make {n * min(k, -(-t // b))}, "
            f"fewer than the {m} x {t} = {m * t} that the run needs; raise max_participations to {-(-m * t // n)} or "
            "lower the rounds or report_goal"
        )


def diurnal(
    hour: Scalar, *, peak: Scalar = 2.0, lowest: Scalar = 0.05, highest: Scalar = 1.0
) -> Float[Array, "..."]:
    """The probability of being available by hour of day: a cosine with its top at `peak` (idle and charging
    at night).

    Args:
      hour, peak: 0 to 24; `peak` may be an array, one a device. lowest, highest: probabilities.
    """
    wave = 0.5 + 0.5 * jnp.cos((jnp.asarray(hour, jnp.float32) - peak) * (2 * jnp.pi / 24))
    return lowest + (highest - lowest) * wave


def select(
    key: Key[Array, ""],
    state: State,
    round: Count,
    *,
    report_goal: int,
    num_chosen: int,
    available: Scalar | Float[Array, " devices"],
    drop_out: Scalar,
    min_separation: Count,
    max_participations: Count,
    max_jitter: int = 0,
) -> tuple[State, Cohort]:
    """Chooses up to `num_chosen` eligible devices at random; the first `report_goal` to report are the
    cohort.

    A uniform choice among the eligible; the order of reports is uniform too. A device's draws follow its
    number.

    Args:
      key: of this attempt, public.
      round: number of the round to be filled; the same again after an abandoned attempt.
      num_chosen: report goal and over-selection; those cut off have started their timer.
      available: probability that a device can be reached now. drop_out: that a chosen one fails to report.
      min_separation: b; rounds t and t + b are both allowed. max_participations: k.
      max_jitter: a wait is lengthened by 0 to this many rounds, uniformly.
    """
    _positive(report_goal=report_goal, num_chosen=num_chosen)
    given = {"min_separation": min_separation, "max_participations": max_participations}
    _positive(**{name: value for name, value in given.items() if isinstance(value, int)})
    num_devices = state.ready.shape[0]
    if not report_goal <= num_chosen <= num_devices:
        raise ValueError(
            f"needed: report_goal <= num_chosen <= devices, got {report_goal=}, {num_chosen=}, {num_devices} devices"
        )
    uniform = lambda name: jax.random.uniform(keys.stream(key, name), (num_devices,))
    round = jnp.asarray(round, jnp.int32)
    eligible = (
        (state.ready <= round) & (state.count < max_participations) & (uniform("available") < available)
    )
    order = jnp.where(eligible, uniform("choice"), 2.0)
    first, chosen = lax.top_k(-order, num_chosen)
    # With too few to meet the goal nobody downloads: only released rounds move timers, so retries that
    # started them would leave fewer and fewer devices, and in the end none.
    is_chosen = (-first < 2.0) & (eligible.sum() >= report_goal)
    drops = uniform("drop out")[chosen] < drop_out
    arrival = jnp.where(is_chosen & ~drops, uniform("arrival")[chosen], 2.0)
    by_arrival = jnp.argsort(arrival)
    chosen, is_chosen, arrival = chosen[by_arrival], is_chosen[by_arrival], arrival[by_arrival]
    released = arrival[report_goal - 1] < 2.0
    reports = (jnp.arange(num_chosen) < report_goal) & released
    gap = round - state.last[chosen]
    breaks = reports & ((gap < min_separation) | (state.count[chosen] >= max_participations))

    wait = jnp.asarray(min_separation, jnp.int32)
    if max_jitter:
        wait = (
            wait + jax.random.randint(keys.stream(key, "jitter"), (num_devices,), 0, max_jitter + 1)[chosen]
        )
    ready = jnp.where(is_chosen, round + wait, state.ready[chosen])
    new = State(
        ready=state.ready.at[chosen].set(ready),
        last=state.last.at[chosen].set(jnp.where(reports, round, state.last[chosen])),
        count=state.count.at[chosen].add(reports.astype(jnp.int32)),
        least_gap=jnp.minimum(state.least_gap, jnp.min(jnp.where(reports, gap, 2**30))),
    )
    return new, Cohort(chosen, is_chosen, reports, released, breaks.any(), eligible.sum())


def measure(state: State) -> Measured:
    """Realised separation and participation, on the host: what an observed guarantee may be stated for."""
    count = np.asarray(state.count)
    gap = int(state.least_gap)
    return Measured(None if gap >= 2**30 else gap, int(count.max()), np.bincount(count).tolist())


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
        if value > MOST:
            raise ValueError(f"{name} must be at most {MOST} (rounds are counted in 32 bits), got {value}")
