"""Choosing settings before a run: calibrate one knob, or lay out which combinations reach a target."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from accounting import _checks, gaussian, guarantees, optimize, strategies
from accounting.errors import prefix_error
from accounting.mechanisms import MatrixMechanism, TreeAggregation
from accounting.reporting import max_separation

M = TypeVar("M", bound=TreeAggregation | MatrixMechanism)
KNOBS = ("noise_multiplier", "num_rounds", "min_separation")
PLANNED = ("tree", "banded square root", "BandMF", "BLT", "independent")


def calibrate(
    mechanism: M,
    *,
    knob: str,
    delta: float,
    epsilon: float | None = None,
    rho: float | None = None,
    at_separation: Callable[[int], M] | None = None,
) -> M:
    """Returns the mechanism with one knob set so that it just meets the target, never exceeds it.

    Args:
      knob: "noise_multiplier" (the least), "num_rounds" (the most, up to 2^20; restarts beyond them are
        dropped) or "min_separation" (the least; with `at_separation` a longer one may cost a little more, and then
        a lesser one may meet the target too). The mechanism's own value of it is ignored.
      delta: where epsilon is meant; also needed with a target rho, to say so in the result's statement.
      epsilon, rho: exactly one target.
      at_separation: with "min_separation", the mechanism at a separation, where its strategy is made for that;
        None keeps the mechanism's own strategy.
    """
    _checks.choice("knob", knob, KNOBS)
    delta = _checks.probability("delta", delta)
    if (epsilon is None) == (rho is None):
        raise ValueError(f"give exactly one target, epsilon or rho, got {epsilon!r} and {rho!r}")
    if epsilon is not None:
        target = gaussian.rho_for(_checks.real("epsilon", epsilon), delta)
    else:
        target = _checks.real("rho", rho)

    def meets(candidate: M) -> bool:
        return guarantees.rho(candidate) <= target

    if knob == "noise_multiplier":
        squared = guarantees.squared_sensitivity(mechanism)
        if squared == 0 or math.isinf(target):
            return dataclasses.replace(mechanism, noise_multiplier=0.0)
        if target == 0:
            raise ValueError(
                "no finite noise_multiplier reaches epsilon 0 or rho 0; raise the target or delta"
            )
        z = math.sqrt(squared / 2 / target)
        while not meets(dataclasses.replace(mechanism, noise_multiplier=z)):
            z *= 1 + 1e-13
        return dataclasses.replace(mechanism, noise_multiplier=z)

    def at(value: int) -> M:
        if knob == "num_rounds":
            kept = tuple(r for r in mechanism.restarts if r < value)
            return dataclasses.replace(mechanism, num_rounds=value, restarts=kept)
        if at_separation is not None:
            return at_separation(value)
        return dataclasses.replace(mechanism, min_separation=value, rounds_between=None)

    if knob == "num_rounds":
        if not meets(at(1)):
            raise ValueError(
                f"no num_rounds reaches the target: one round already costs rho {guarantees.rho(at(1)):.4g}; "
                "raise noise_multiplier"
            )
        return at(_last(lambda n: meets(at(n)), 1, 1 << 20, "num_rounds"))
    longest = max(mechanism.num_rounds, 1)
    if not meets(at(longest)):
        raise ValueError(
            f"no min_separation reaches the target: a single participation in {longest} rounds already costs "
            f"rho {guarantees.rho(at(longest)):.4g}; raise noise_multiplier"
        )
    less = _last(
        lambda step: meets(at(longest - step)), 0, longest - 1, "min_separation", gallop=at_separation is None
    )
    return at(longest - less)


def _last(holds, low: int, high: int, name: str, *, gallop: bool = True) -> int:
    """The largest integer in [low, high] for which a claim that stops holding once still holds.

    Args:
      gallop: large cases cost more; else all cost the same, and fewest are tried.
    """
    if not holds(low):
        raise ValueError(f"no {name} reaches the target")
    step = 1
    while gallop and low + step <= high and holds(low + step):
        low, step = low + step, 2 * step
    high = min(high, low + step - 1) if gallop and low + step <= high else high
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


class Option(NamedTuple):
    """One line of a plan.

    noise_multiplier: z; noise_per_client: z / m, which is what hurts utility for a given mechanism.
    min_separation: b (MinS = b - 1 rounds between), max_participations: k over the run.
    worst_noise: standard deviation of the worst prefix sum, per client: z x prefix error / m, in clip norms.
    meets: whether epsilon reaches the target.
    """

    mechanism: str
    report_goal: int
    noise_multiplier: float
    noise_per_client: float
    min_separation: int
    max_participations: int
    squared_sensitivity: float
    rho: float
    epsilon: float
    worst_noise: float
    meets: bool


def plan(
    *,
    population: int,
    report_goals: Sequence[int],
    num_rounds: int,
    epsilon: float,
    delta: float,
    adjacency: str,
    noise_multipliers: Sequence[float] = (),
    mechanisms: Sequence[str] = PLANNED,
) -> list[Option]:
    """Says which (report goal, z, MinS, mechanism) reach epsilon at delta for N devices and n rounds.

    Each report goal m gets the largest separation that the population allows, floor(N / m). For each
    mechanism there is the least z that reaches the target, and one line for each of `noise_multipliers`,
    reached or not. Sorted by worst prefix noise per client, the reaching ones first: the frontier is at the
    top.

    Args:
      report_goals: devices a round to consider.
      noise_multipliers: z to try beside the least one.
      mechanisms: any of "tree", "banded square root", "BandMF", "BLT", "independent".
    """
    n = _checks.integer("num_rounds", num_rounds, minimum=1)
    target = _checks.real("epsilon", epsilon, above=True)
    delta = _checks.probability("delta", delta)
    if delta == 0:
        raise ValueError("delta must be above 0: Gaussian noise gives no pure epsilon")
    for argument, values in (("report_goals", report_goals), ("mechanisms", mechanisms)):
        if not len(values):
            raise ValueError(f"{argument} must name at least one to consider, got none")
    options = []
    for m in report_goals:
        b = min(max_separation(population, m), n)
        k = -(-n // b)
        for name in mechanisms:
            run = describe(name, num_rounds=n, min_separation=b, max_participations=k, adjacency=adjacency)
            error = prefix_error(run).max
            least = calibrate(run, knob="noise_multiplier", delta=delta, epsilon=target)
            for z in [least.noise_multiplier, *noise_multipliers]:
                ran = dataclasses.replace(run, noise_multiplier=z)
                eps = guarantees.epsilon(ran, delta=delta)
                options.append(
                    Option(
                        mechanism=name,
                        report_goal=m,
                        noise_multiplier=ran.noise_multiplier,
                        noise_per_client=ran.noise_multiplier / m,
                        min_separation=b,
                        max_participations=k,
                        squared_sensitivity=guarantees.squared_sensitivity(ran),
                        rho=guarantees.rho(ran),
                        epsilon=eps,
                        worst_noise=ran.noise_multiplier * error / m,
                        meets=eps <= target,
                    )
                )
    return sorted(options, key=lambda option: (not option.meets, option.worst_noise))


def describe(
    name: str,
    *,
    num_rounds: int,
    min_separation: int,
    max_participations: int,
    adjacency: str,
    noise_multiplier: float = 1.0,
) -> TreeAggregation | MatrixMechanism:
    """Returns the named mechanism at (n, b, k), its strategy chosen for the worst prefix."""
    _checks.choice("mechanism", name, PLANNED)
    n, b, k = num_rounds, min_separation, max_participations
    if name == "tree":
        return TreeAggregation(
            noise_multiplier=noise_multiplier,
            num_rounds=n,
            min_separation=b,
            max_participations=k,
            adjacency=adjacency,
        )
    strategy: strategies.Strategy
    if name == "independent":
        strategy = strategies.independent()
    elif name == "banded square root":
        strategy = strategies.banded_square_root(min(b, n))
    elif name == "BandMF":
        strategy = optimize.banded(num_rounds=n, min_separation=b, max_participations=k, bands=min(b, n))
    else:
        strategy = optimize.blt(num_rounds=n, min_separation=b, max_participations=k)
    return MatrixMechanism(
        noise_multiplier=noise_multiplier,
        num_rounds=n,
        min_separation=b,
        max_participations=k,
        adjacency=adjacency,
        strategy=strategy,
    )
