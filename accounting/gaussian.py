"""The exact privacy curve of a Gaussian mechanism, in log space.

A Gaussian with zCDP rho has mu = sqrt(2 rho) (sensitivity over standard deviation), and by Balle and Wang
(2018, arXiv:1805.06530, theorem 8)

    delta(eps) = Q(a) - e^eps Q(b),   a = eps / mu - mu / 2,  b = a + mu,

Q the normal upper tail. With Mills' ratio R = Q / phi this is phi(a) (R(a) - R(b)): no exponential of eps, no
underflow before delta does. Where mu is so small that the difference would cancel, it is its own Taylor
series. Functions here take and return float64 arrays; scipy is imported when one is first called.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

LOG_2PI = math.log(2 * math.pi)
SERIES_BELOW = 1e-3  # the mu below which R(a) - R(b) is its Taylor series
FAR = 1e3  # deltas beyond are zero in any arithmetic, but must stay ordered
# The arithmetic below is right to a few 1e-16; results move up by these, so that rounding never flatters.
RELATIVE_SLACK, ABSOLUTE_SLACK = 4e-12, 2e-14


def _log_delta(eps: np.ndarray, mu: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (log delta, log(1 - delta)) for mu > 0 and eps >= 0, both finite.

    The first is accurate where delta is below about a half, the second elsewhere (a <= -1).
    """
    from scipy.special import erfcx

    def mills(x):
        return math.sqrt(math.pi / 2) * erfcx(x / math.sqrt(2))

    a = eps / mu - mu / 2
    b = a + mu
    t = np.clip(a, -1.0, FAR)  # the branch below a = -1 uses the complement
    middle = t + mu / 2
    slope = np.maximum(1 - middle * mills(middle), 0.0)  # -R'
    bend = 2 * slope + middle * (middle * slope - mills(middle))  # its second derivative
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        gap = np.where(mu < SERIES_BELOW, mu * (slope + mu * mu * bend / 24), mills(t) - mills(t + mu))
        log_gap = np.where(a > FAR, np.log(mu) - np.log(a) - np.log(b), np.log(gap))  # R(a) ~ 1 / a
        log_delta = -(np.maximum(a, -1.0) ** 2 + LOG_2PI) / 2 + log_gap
        log_rest = -(a * a + LOG_2PI) / 2 + np.log(mills(np.maximum(-a, -1.0)) + mills(np.maximum(b, 0.0)))
    return log_delta, log_rest


def log_delta(eps: ArrayLike, rho: ArrayLike) -> np.ndarray:
    """Returns the log of the least delta at each `eps` >= 0; -inf for rho = 0, 0 for rho = inf."""
    eps, rho = np.broadcast_arrays(np.asarray(eps, np.float64), np.asarray(rho, np.float64))
    result = np.where(np.isinf(rho), 0.0, -np.inf)
    usual = (rho > 0) & np.isfinite(rho) & np.isfinite(eps)
    mu = np.sqrt(2 * rho[usual])
    small, rest = _log_delta(eps[usual], mu)
    complement = eps[usual] / mu - mu / 2 <= -1
    with np.errstate(divide="ignore"):
        result[usual] = np.where(complement, np.log1p(-np.exp(np.minimum(rest, 0.0))), small)
    return np.minimum(result, 0.0)


def epsilon(rho: ArrayLike, delta: ArrayLike) -> np.ndarray:
    """Returns the least eps >= 0 with delta(eps) <= `delta`, rounded up by at most 1e-11 relative plus 2e-14.

    Args:
      rho: >= 0, may be infinite (eps is then infinite).
      delta: in [0, 1); at 0 a Gaussian has eps = inf unless rho = 0.
    """
    rho, delta = np.broadcast_arrays(np.asarray(rho, np.float64), np.asarray(delta, np.float64))
    result = np.where(rho == 0, 0.0, np.inf)
    usual = (rho > 0) & np.isfinite(rho) & (delta > 0)
    mu, d = np.sqrt(2 * rho[usual]), delta[usual]
    if not mu.size:
        return result
    log_d, log_rest = np.log(d), np.log1p(-d)

    def enough(eps, margin=0.0):  # does this eps suffice?
        small, rest = _log_delta(eps, mu)
        return np.where(eps / mu - mu / 2 <= -1, rest >= log_rest + margin, small <= log_d - margin)

    low = np.zeros_like(mu)
    # Q(a) <= exp(-a^2 / 2) / 2 for a >= 0 bounds the answer from above.
    a = np.sqrt(2 * np.maximum(-np.log(2) - log_d, 0.0))
    high = mu * (a + mu / 2) * (1 + 1e-9)
    free = enough(low, 1e-11)  # 0 only where rounding cannot have decided it
    for _ in range(100):
        middle = (low + high) / 2
        good = enough(middle)
        low, high = np.where(good, low, middle), np.where(good, middle, high)
        if np.all(high - low <= 1e-16 * high):
            break
    slack = RELATIVE_SLACK * high + ABSOLUTE_SLACK * np.where(mu < SERIES_BELOW, mu, 1.0)
    result[usual] = np.where(free, 0.0, high + slack)
    return result


def rho_for(epsilon_target: float, delta: float) -> float:
    """Returns the largest rho (to 1e-10) whose `epsilon` at `delta` does not exceed `epsilon_target`."""
    if epsilon_target == math.inf:
        return math.inf
    if delta == 0:
        return 0.0
    low, high = -400.0, 400.0  # log2 of rho; delta rises with it
    for _ in range(70):
        middle = (low + high) / 2
        if float(log_delta(epsilon_target, 2.0**middle)) <= math.log(delta):
            low = middle
        else:
            high = middle
    if low == -400.0:
        return 0.0
    rho, step = 2.0**low, 1e-11
    while epsilon(rho, delta) > epsilon_target:  # the slack of `epsilon`
        rho, step = rho * (1 - step), 2 * step
    return rho
