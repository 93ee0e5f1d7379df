"""Noisy, thresholded histograms whose set of buckets is private itself.

A unit adds weight at most 1 to each of at most r distinct buckets. Counts get Gaussian noise, and a bucket is
released only if its noisy count exceeds tau > 1. Buckets that only this unit filled hold at most 1, so one of
them shows with probability at most 1 - Phi((tau - 1) / sigma)^r: between neighbours these buckets are that
far apart in total variation (also if both fill some of their own), the others by delta_Gauss(eps), and the
two add.
"""

import math

from accounting import _checks, conversions

SQUARED_FACTOR = {
    "zero-out": 1,
    "add-remove": 1,
    "replace-one": 2,
}  # sqrt(2 r): disjoint buckets do not align


def histogram_delta(
    *, epsilon: float, stddev: float, threshold: float, max_buckets: int, adjacency: str
) -> float:
    """Returns delta_Gauss(eps) + 1 - Phi((tau - 1) / sigma)^r, at most 1.

    Args:
      stddev: sigma of the noise on each count.
      threshold: tau > 1, public.
      max_buckets: r, buckets of one unit. L2 sensitivity is sqrt(r), for replacement sqrt(2 r).
      adjacency: "add-remove", "zero-out" or "replace-one".
    """
    sigma, r, squared = _setting(stddev, threshold, max_buckets, adjacency)
    epsilon = _checks.real("epsilon", epsilon)
    if sigma == 0:
        return 1.0
    gaussian = conversions.delta_from_rho(squared / 2 / sigma / sigma, epsilon=epsilon)
    return min(1.0, gaussian + _shown(sigma, threshold, r))


def histogram_epsilon(
    *, delta: float, stddev: float, threshold: float, max_buckets: int, adjacency: str
) -> float:
    """Returns the least epsilon at `delta`; infinite if showing an own bucket alone costs more than that."""
    sigma, r, squared = _setting(stddev, threshold, max_buckets, adjacency)
    delta = _checks.probability("delta", delta)
    if sigma == 0:
        return math.inf
    left = delta - _shown(sigma, threshold, r)
    if left <= 0:
        return math.inf
    return conversions.epsilon_from_rho(
        squared / 2 / sigma / sigma, delta=left * (1 - 1e-12), known="gaussian"
    )


def histogram_threshold(
    *, delta: float, stddev: float, max_buckets: int, adjacency: str, share: float = 0.5
) -> float:
    """Returns the threshold at which showing a bucket of one's own costs `share` of delta."""
    sigma, r, _ = _setting(stddev, 2.0, max_buckets, adjacency)
    delta = _checks.probability("delta", delta)
    share = _checks.finite("share", share, above=True)
    if delta == 0 or share >= 1:
        raise ValueError(f"delta and share must lie in (0, 1), got {delta=} and {share=}")
    from scipy.special import log_ndtr, ndtri_exp

    each = -math.expm1(math.log1p(-delta * share) / r)
    t = -float(ndtri_exp(math.log(each)))
    while -math.expm1(r * float(log_ndtr(t))) > delta * share:
        t *= 1 + 1e-13
    return 1 + sigma * t * (1 + 1e-12)


def _setting(stddev: float, threshold: float, max_buckets: int, adjacency: str) -> tuple[float, int, int]:
    sigma = _checks.finite("stddev", stddev)
    if _checks.finite("threshold", threshold) <= 1:
        raise ValueError(f"threshold must be more than 1 (a unit's own weight), got {threshold!r}")
    r = _checks.integer("max_buckets", max_buckets, minimum=1)
    return sigma, r, r * SQUARED_FACTOR[_checks.adjacency(adjacency)]


def _shown(sigma: float, threshold: float, r: int) -> float:
    """1 - Phi((tau - 1) / sigma)^r, without cancellation, rounded up."""
    from scipy.special import log_ndtr

    return -math.expm1(r * float(log_ndtr((threshold - 1) / sigma))) * (1 + 1e-12)
