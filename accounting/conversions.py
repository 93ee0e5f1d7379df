"""From zCDP to (epsilon, delta): exact for Gaussians, the best order for a bare bound, peers to compare."""

import math

import numpy as np
from numpy.typing import ArrayLike

from accounting import _checks, gaussian

METHODS = ("exact", "pld", "rdp", "cks")


def epsilon_from_rho(rho: float, *, delta: float, known: str) -> float:
    """Returns the epsilon at `delta` of something whose zCDP is `rho`; what is known of it must be said.

    Args:
      rho: >= 0; 0 gives 0, infinity gives infinity.
      delta: in [0, 1). 0 gives infinity (unless rho = 0): no zCDP bound is pure.
      known: "gaussian" if every release is Gaussian noise of this rho (the exact curve of Balle and Wang
        2018); "zcdp" if only the bound is known (the best order of Canonne, Kamath and Steinke 2020,
        arXiv:2004.00010, proposition 12), which is larger.
    """
    rho = _checks.real("rho", rho)
    delta = _checks.probability("delta", delta)
    _checks.choice("known", known, ("gaussian", "zcdp"))
    return float(epsilon_curve(rho, delta, known=known))


def epsilon_curve(rho: ArrayLike, delta: ArrayLike, *, known: str) -> np.ndarray:
    """`epsilon_from_rho` for arrays that broadcast: a curve of a thousand points in milliseconds."""
    rho, delta = np.asarray(rho, np.float64), np.asarray(delta, np.float64)
    if np.isnan(rho).any() or (rho < 0).any():
        raise ValueError("rho must be at least 0 and not NaN everywhere")
    if np.isnan(delta).any() or (delta < 0).any() or (delta >= 1).any():
        raise ValueError("delta must lie in [0, 1) and not be NaN everywhere")
    _checks.choice("known", known, ("gaussian", "zcdp"))
    return gaussian.epsilon(rho, delta) if known == "gaussian" else _cks(rho, delta)


def _cks(rho: ArrayLike, delta: ArrayLike) -> np.ndarray:
    """min over alpha > 1 of
    alpha rho + (log(1/delta) + (alpha - 1) log(1 - 1/alpha) - log alpha) / (alpha - 1).

    The derivative's sign is that of rho (alpha - 1)^2 + log(alpha) - log(1/delta), which rises: one root.
    """
    rho, delta = np.broadcast_arrays(rho, delta)
    result = np.where(rho == 0, 0.0, np.inf)
    usual = (rho > 0) & np.isfinite(rho) & (delta > 0)
    r, need = rho[usual], -np.log(delta[usual])
    low, high = np.full_like(r, -800.0), np.full_like(r, 800.0)  # log(alpha - 1)
    for _ in range(80):
        middle = (low + high) / 2
        with np.errstate(over="ignore"):
            rising = r * np.exp(2 * middle) + np.logaddexp(0, middle) >= need
        low, high = np.where(rising, low, middle), np.where(rising, middle, high)
    x = np.exp(np.minimum(high, 700.0))  # alpha - 1
    log_alpha = np.logaddexp(0, high)
    value = (1 + x) * r + (need - log_alpha) / x + (high - log_alpha)
    result[usual] = np.maximum(value, 0.0) * (1 + 1e-14)
    return result


def delta_from_rho(rho: float, *, epsilon: float) -> float:
    """Returns the least delta at `epsilon` of a Gaussian mechanism of this rho, never below the truth."""
    rho = _checks.real("rho", rho)
    epsilon = _checks.real("epsilon", epsilon)
    value = math.exp(float(gaussian.log_delta(epsilon, rho)))
    return min(value * (1 + 1e-11), 1.0)


def epsilon_by_peer(rho: float, *, delta: float, method: str) -> float:
    """Returns what dp-accounting's PLD or RDP accountant says of a Gaussian with this rho."""
    rho, delta = _checks.real("rho", rho), _checks.probability("delta", delta)
    if rho == 0:
        return 0.0
    if math.isinf(rho) or delta == 0:
        return math.inf
    from dp_accounting import dp_event

    if method == "pld":
        from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

        accountant = PLDAccountant()
        accountant.compose(dp_event.GaussianDpEvent(1 / math.sqrt(2 * rho)))
    else:
        from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant

        accountant = RdpAccountant()
        accountant.compose(dp_event.ZCDpEvent(rho))
    return float(accountant.get_epsilon(delta))


def pure_to_rho(epsilon: float, *, bounded_range: bool = False) -> float:
    """Returns the zCDP of a pure eps guarantee: eps^2 / 2, or eps^2 / 8 for the true exponential mechanism.

    eps^2 / 8 needs bounded range (Cesar and Rogers 2021, arXiv:2004.07223); permute-and-flip or any other
    sampler does not have it.
    """
    epsilon = _checks.real("epsilon", epsilon)
    return epsilon / 8 * epsilon if bounded_range else epsilon / 2 * epsilon
