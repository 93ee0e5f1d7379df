"""From a mechanism to zCDP and (epsilon, delta); composition, groups, the adaptive-clipping split."""

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from accounting import _checks, conversions, sensitivity
from accounting.mechanisms import (
    SENSITIVITY_FACTOR,
    DistributedDiscreteGaussian,
    MatrixMechanism,
    Mechanism,
    PureDP,
    QuantileEstimation,
    SecureAggregation,
    TreeAggregation,
    padded,
)

CKS = "zCDP bound (Canonne, Kamath, Steinke 2020)"


class Guarantee(NamedTuple):
    """What one or more mechanisms together guarantee one unit.

    rho: zCDP. epsilon: at `delta`. known: "gaussian", "pure" or "mixed". how: the conversion, in words.
    """

    rho: float
    epsilon: float
    delta: float
    known: str
    how: str
    unit: str
    adjacency: str


def squared_sensitivity(mechanism: Mechanism) -> float:
    """Returns the worst-case squared sensitivity in units of clip norm squared: an integer for trees.

    Quantile bits count in units of their own bound 1/2, secure aggregation in units of the clip norm before
    inflation.
    """
    return sensitivity_of(mechanism).squared


def sensitivity_of(mechanism: Mechanism) -> sensitivity.Sensitivity:
    """Returns the squared sensitivity with whether it is exact and how it was found."""
    if isinstance(mechanism, QuantileEstimation):
        return sensitivity.of(mechanism.mechanism)
    if isinstance(mechanism, SecureAggregation):
        found = sensitivity.of(mechanism.mechanism)
        return found._replace(squared=found.squared * mechanism.inflation**2)
    if isinstance(mechanism, (TreeAggregation, MatrixMechanism)):
        return sensitivity.of(mechanism)
    raise ValueError(
        f"{type(mechanism).__name__} has no L2 sensitivity; use accounting.epsilon or accounting.rho"
    )


def rho(mechanism: Mechanism) -> float:
    """Returns the zCDP of the whole run: squared sensitivity / (2 z^2); infinite at z = 0, 0 at z = inf."""
    if isinstance(mechanism, PureDP):
        one = conversions.pure_to_rho(mechanism.epsilon, bounded_range=mechanism.bounded_range)
        return one * mechanism.releases if mechanism.releases else 0.0
    if isinstance(mechanism, DistributedDiscreteGaussian):
        return _discrete_rho(mechanism)
    if isinstance(mechanism, (QuantileEstimation, SecureAggregation)):
        noise_multiplier = mechanism.mechanism.noise_multiplier
    elif isinstance(mechanism, (TreeAggregation, MatrixMechanism)):
        noise_multiplier = mechanism.noise_multiplier
    else:
        raise ValueError(f"rho needs a mechanism of accounting, got {type(mechanism).__name__}")
    return rho_from_sensitivity(squared_sensitivity(mechanism), noise_multiplier)


def _discrete_rho(mechanism: DistributedDiscreteGaussian) -> float:
    """zCDP of sums of discrete Gaussians, one independent release a participation."""
    if mechanism.participations == 0 or math.isinf(mechanism.noise_multiplier):
        return 0.0
    if mechanism.noise_multiplier == 0:
        return math.inf
    ratio = SENSITIVITY_FACTOR[mechanism.adjacency] * mechanism.inflation / mechanism.noise_multiplier
    dimension, tau = padded(mechanism.dimension), mechanism.tau
    one = min(ratio * ratio / 2 + tau * dimension, (ratio + tau * math.sqrt(dimension)) ** 2 / 2)
    return one * mechanism.participations


def rho_from_sensitivity(squared: float, noise_multiplier: float) -> float:
    """Returns squared / (2 z^2) without overflow: 0 if nothing was released, infinite without noise."""
    squared = _checks.real("squared", squared)
    noise_multiplier = _checks.real("noise_multiplier", noise_multiplier)
    if squared == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    if math.isinf(noise_multiplier):
        return 0.0
    found = squared / 2 / noise_multiplier / noise_multiplier
    return found if found or not squared else math.ulp(0.0)  # less than a float holds, and not nothing


def epsilon(mechanism: Mechanism, *, delta: float, method: str = "exact") -> float:
    """Returns epsilon at `delta`, from the unrounded rho.

    Args:
      method: "exact" (Gaussian curve; for others the best valid bound), "cks" (as if only zCDP were known),
        and for comparison "pld" and "rdp" through dp-accounting: never tighter for Gaussians, PLD infinite
        below delta of about 1e-15.
    """
    _checks.choice("method", method, conversions.METHODS)
    delta = _checks.probability("delta", delta)
    if method == "exact":
        return compose([mechanism], delta=delta).epsilon
    if method == "cks":
        return conversions.epsilon_from_rho(rho(mechanism), delta=delta, known="zcdp")
    if isinstance(mechanism, (PureDP, DistributedDiscreteGaussian)):
        kind = type(mechanism).__name__
        raise ValueError(f"method {method!r} serves Gaussian mechanisms; {kind} takes 'exact' or 'cks'")
    return conversions.epsilon_by_peer(rho(mechanism), delta=delta, method=method)


def delta(mechanism: Mechanism, *, epsilon: float) -> float:
    """Returns the least delta at `epsilon` of Gaussian mechanisms; of PureDP 0 from its total epsilon on."""
    if isinstance(mechanism, PureDP):
        epsilon = _checks.real("epsilon", epsilon)
        total = mechanism.epsilon * mechanism.releases if mechanism.releases else 0.0
        if total <= epsilon:
            return 0.0
        raise ValueError(
            f"delta of PureDP is 0 only from its total epsilon {total:g} on, got epsilon {epsilon:g}; "
            "use accounting.epsilon at a delta of your choice"
        )
    if isinstance(mechanism, DistributedDiscreteGaussian):
        raise ValueError(
            "delta needs a Gaussian mechanism; of a DistributedDiscreteGaussian only zCDP is known: "
            "use accounting.epsilon at a delta of your choice"
        )
    return conversions.delta_from_rho(rho(mechanism), epsilon=epsilon)


def compose(mechanisms: Sequence[Mechanism], *, delta: float, group_size: int = 1) -> Guarantee:
    """Returns what several mechanisms over the same units guarantee together.

    Gaussian parts add their rho and keep the exact curve; pure parts add their epsilons or their rho,
    whichever gives less; mixtures take the best of dp-accounting's PLD, the zCDP bound and simple addition.
    Unequal units or adjacencies are refused.

    Args:
      group_size: r devices of one user: rho x r^2, pure epsilon x r.
    """
    delta = _checks.probability("delta", delta)
    size = _checks.integer("group_size", group_size, minimum=1)
    for name in ("unit", "adjacency"):
        values = sorted({getattr(m, name) for m in mechanisms})
        if len(values) > 1:
            raise ValueError(f"cannot compose mechanisms of unequal {name}: {', '.join(values)}")
    if not mechanisms:
        return Guarantee(0.0, 0.0, delta, "gaussian", "nothing was released", "none", "none")
    unit, adjacency = mechanisms[0].unit, mechanisms[0].adjacency
    if size > 1:
        unit = f"group of {size} {unit}s"
    pure = [m for m in mechanisms if isinstance(m, PureDP) and m.releases]
    discrete = [m for m in mechanisms if isinstance(m, DistributedDiscreteGaussian)]
    gaussian_rho = _sum(
        rho(m) for m in mechanisms if not isinstance(m, (PureDP, DistributedDiscreteGaussian))
    ) * (size * size)
    total = gaussian_rho + _sum(rho(m) for m in [*pure, *discrete]) * (size * size)
    if discrete:
        eps = conversions.epsilon_from_rho(total, delta=delta, known="zcdp")
        return Guarantee(total, eps, delta, "mixed", CKS, unit, adjacency)
    if not pure:
        eps = conversions.epsilon_from_rho(gaussian_rho, delta=delta, known="gaussian")
        how = "exact curve of a Gaussian with this rho (Balle and Wang 2018)"
        return Guarantee(total, eps, delta, "gaussian", how, unit, adjacency)
    summed = _sum(m.epsilon * m.releases for m in pure) * size
    bounds = {"pure epsilons added": summed}
    if gaussian_rho > 0:
        with_gaussian = conversions.epsilon_from_rho(gaussian_rho, delta=delta, known="gaussian")
        bounds = {"exact Gaussian epsilon plus pure epsilons": summed + with_gaussian}
    if delta > 0:
        bounds[CKS] = conversions.epsilon_from_rho(total, delta=delta, known="zcdp")
        if size == 1 and delta > 1e-15 and (gaussian_rho > 0 or sum(m.releases for m in pure) > 1):
            bounds["privacy loss distributions (dp-accounting)"] = _by_pld(gaussian_rho, pure, delta)
    how = min(bounds, key=lambda name: bounds[name])
    known = "mixed" if gaussian_rho > 0 else "pure"
    return Guarantee(total, bounds[how], delta, known, how, unit, adjacency)


def _sum(values: Iterable[float]) -> float:
    """Adds costs; `math.fsum` refuses what overflows, which here means infinite."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def _by_pld(gaussian_rho: float, pure: Sequence[PureDP], delta: float) -> float:
    """Composes randomized response (the worst pure mechanism) and one Gaussian as PLDs."""
    if any(m.epsilon > 40 for m in pure) or not gaussian_rho < 1e4:
        return math.inf  # grids would be huge, and the other bounds are as good
    from dp_accounting.pld import common, privacy_loss_distribution

    parts = [
        privacy_loss_distribution.from_privacy_parameters(
            common.DifferentialPrivacyParameters(m.epsilon, 0.0)
        ).self_compose(m.releases)
        for m in pure
        if m.epsilon > 0
    ]
    if gaussian_rho > 0:
        parts.append(privacy_loss_distribution.from_gaussian_mechanism(1 / math.sqrt(2 * gaussian_rho)))
    if not parts:
        return 0.0
    total = parts[0]
    for part in parts[1:]:
        total = total.compose(part)
    return float(total.get_epsilon_for_delta(delta))


def value_noise_multiplier(noise_multiplier: float, *, count_stddev: float) -> float:
    """Returns z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2): the updates' noise when clip bits are released too.

    Together they cost what z alone costs, if both go through the same strategy, restarts and schedule (Andrew
    et al. 2021, arXiv:1905.03871, theorem 1). z = 0 stays 0. z >= 2 sigma_b is refused; a warning says when
    the bits more than double the noise.
    """
    z = _checks.real("noise_multiplier", noise_multiplier)
    sigma_b = _checks.real("count_stddev", count_stddev, above=True)
    if z == 0:
        return 0.0
    if z >= 2 * sigma_b:
        raise ValueError(
            f"noise_multiplier must be below 2 x count_stddev = {2 * sigma_b:g}, got {z:g}: "
            "no noise on the updates makes up for so little on the bits; raise count_stddev"
        )
    share = z / (2 * sigma_b)
    result = z / math.sqrt((1 - share) * (1 + share))
    if result > 2 * z:
        warnings.warn(
            f"count_stddev {sigma_b:g} is so close to noise_multiplier / 2 that the updates need "
            f"{result / z:.3g} times the noise; raise count_stddev",
            stacklevel=2,
        )
    return result


def default_count_stddev(report_goal: int) -> float:
    """Returns the usual sigma_b, report goal / 20."""
    return _checks.integer("report_goal", report_goal, minimum=1) / 20


def document_epsilon(epsilon: float, *, num_sentences: int, utility: str) -> float:
    """Returns epsilon between two documents of k sentences that differ everywhere, for one release.

    eps x floor(k / 2) for the strict depth (its range is that small), eps x k for closed depth, bounded sum,
    low rank and truncation (group privacy).
    """
    epsilon = _checks.real("epsilon", epsilon)
    k = _checks.integer("num_sentences", num_sentences, minimum=0)
    _checks.choice(
        "utility", utility, ("strict_depth", "closed_depth", "bounded_sum", "low_rank", "truncation")
    )
    times = k // 2 if utility == "strict_depth" else k
    return epsilon * times if times else 0.0
