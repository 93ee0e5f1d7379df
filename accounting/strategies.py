"""Strategy matrices C of the matrix mechanism: what is released is A (x + C^-1 w) with Gaussian w.

Coefficients are plain float64 numpy arrays, in one format everywhere in the project:

- Toeplitz: `coefficients` c_0, c_1, ... of the first column of C (zero beyond its end); c_0 > 0.
- BLT (buffered linear Toeplitz; Dvijotham et al. 2024, arXiv:2404.16706): `theta` (decay) and `omega` (output
  scale), one entry a buffer, with c_0 = 1 and c_j = sum_i omega_i theta_i^(j - 1) for j >= 1.
- Dense: any lower-triangular `matrix` with a positive diagonal.

Noise is made in float32, so hand over `applied(strategy)`: coefficients rounded as the trainer applies them.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from accounting import _checks


def _array(name: str, values: Any, dimensions: int = 1) -> np.ndarray:
    try:
        array = np.array(values, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be an array of numbers") from None
    if array.ndim != dimensions or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(
            f"{name} must be a non-empty array of {dimensions} dimension(s) of finite numbers, "
            f"got shape {array.shape}"
        )
    array.flags.writeable = False
    return array


_SMALLEST = 1e-100  # of what a strategy is divided by: less leaves the range of floats


class _ByContent:
    """Arrays compare and hash by content, so that strategies do too."""

    def _content(self) -> tuple:
        return tuple(
            (v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v
            for v in (getattr(self, f.name) for f in dataclasses.fields(self))  # pyright: ignore
        )

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._content() == other._content()  # pyright: ignore

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._content()))


@dataclasses.dataclass(frozen=True, eq=False)
class Toeplitz(_ByContent):
    """A lower-triangular Toeplitz strategy, given by its first column; zero beyond the given coefficients.

    name: how tables and statements call it.
    """

    coefficients: np.ndarray
    name: str = "toeplitz"

    def __post_init__(self):
        object.__setattr__(self, "coefficients", _array("coefficients", self.coefficients))
        if not self.coefficients[0] >= _SMALLEST:
            raise ValueError(
                f"coefficients must begin with a positive number, at least {_SMALLEST:g}, got {self.coefficients[0]}"
            )

    def column(self, num_rounds: int) -> np.ndarray:
        """Returns the first `num_rounds` coefficients."""
        given = self.coefficients[:num_rounds]
        return np.concatenate([given, np.zeros(num_rounds - len(given))])


@dataclasses.dataclass(frozen=True, eq=False)
class BLT(_ByContent):
    """A buffered linear Toeplitz strategy: c_0 = 1, c_j = sum_i omega_i theta_i^(j - 1)."""

    theta: np.ndarray
    omega: np.ndarray
    name: str = "blt"

    def __post_init__(self):
        object.__setattr__(self, "theta", _array("theta", self.theta))
        object.__setattr__(self, "omega", _array("omega", self.omega))
        if self.theta.shape != self.omega.shape:
            raise ValueError(
                "theta and omega must have one entry a buffer each, "
                f"got {len(self.theta)} and {len(self.omega)}"
            )
        if (np.abs(self.theta) >= 1).any():
            raise ValueError(f"theta must lie in (-1, 1), got {self.theta.tolist()}")

    def column(self, num_rounds: int) -> np.ndarray:
        """Returns the first `num_rounds` coefficients."""
        powers = np.ones((len(self.theta), max(num_rounds - 1, 0)))
        powers[:, 1:] = self.theta[:, None]
        tail = self.omega @ np.cumprod(powers, axis=1)
        return np.concatenate([[1.0], tail])[:num_rounds]


@dataclasses.dataclass(frozen=True, eq=False)
class Dense(_ByContent):
    """Any lower-triangular strategy, for a run of exactly as many rounds as it has rows (or fewer)."""

    matrix: np.ndarray
    name: str = "dense"

    def __post_init__(self):
        object.__setattr__(self, "matrix", _array("matrix", self.matrix, 2))
        rows, columns = self.matrix.shape
        if rows != columns or np.triu(self.matrix, 1).any() or not (np.diag(self.matrix) >= _SMALLEST).all():
            raise ValueError(
                "matrix must be square and lower triangular with a positive diagonal, "
                f"got shape {self.matrix.shape}"
            )


Strategy = Toeplitz | BLT | Dense


def independent() -> Toeplitz:
    """Returns C = I: fresh noise every round, DP-FedAvg without amplification."""
    return Toeplitz(np.ones(1), "independent")


def prefix(num_rounds: int) -> Toeplitz:
    """Returns C = A, all ones: noise on the final prefix only (each release carries one fresh Gaussian)."""
    return Toeplitz(np.ones(_checks.integer("num_rounds", num_rounds, minimum=1)), "prefix")


def square_root(num_rounds: int) -> Toeplitz:
    """Returns C = A^(1/2): c_j = binom(2j, j) / 4^j (Fichtenberger et al. 2023, arXiv:2202.11205)."""
    return Toeplitz(_square_root(_checks.integer("num_rounds", num_rounds, minimum=1)), "square root")


def banded_square_root(bands: int) -> Toeplitz:
    """Returns the first `bands` coefficients of A^(1/2) (Kalinin and Lampert 2024, arXiv:2405.13763)."""
    return Toeplitz(_square_root(_checks.integer("bands", bands, minimum=1)), "banded square root")


def banded_inverse_square_root(num_rounds: int, bands: int) -> Toeplitz:
    """Returns the C whose inverse is A^(-1/2) cut to `bands` bands (Kalinin et al., arXiv:2505.12128)."""
    bands = _checks.integer("bands", bands, minimum=1)
    num_rounds = _checks.integer("num_rounds", num_rounds, minimum=1)
    steps = np.arange(1.0, min(bands, num_rounds))
    inverse = np.concatenate([[1.0], np.cumprod((steps - 1.5) / steps)])
    return Toeplitz(invert(inverse, num_rounds), "banded inverse square root")


def rational_blt(num_rounds: int, buffers: int) -> BLT:
    """Returns a BLT close to A^(1/2) over `num_rounds`, in closed form (no optimizer).

    A^(1/2) has c_j = (1/pi) int_0^1 t^j dt / sqrt(t (1 - t)); with t = 1 / (1 + e^-u) the trapezoid rule in u
    converges geometrically, and its nodes are the decays. The range of u covers what rounds 1 to n can see.
    """
    num_rounds = _checks.integer("num_rounds", num_rounds, minimum=1)
    buffers = _checks.integer("buffers", buffers, minimum=1)
    low, high = -0.5, math.log(2 * num_rounds) + 0.5
    step = (high - low) / buffers
    u = low + step * (np.arange(buffers) + 0.5)
    theta = 1 / (1 + np.exp(-u))
    omega = step / math.pi * theta**1.5 * np.sqrt(1 - theta)
    return BLT(theta, omega / max(omega.sum() / 0.5, 1.0), "blt (closed form)")


def applied(strategy: Strategy) -> Strategy:
    """Returns the strategy with its coefficients rounded to float32, which is what a trainer applies."""
    rounded = {
        f.name: np.float64(np.float32(value))
        for f in dataclasses.fields(strategy)
        if isinstance(value := getattr(strategy, f.name), np.ndarray)
    }
    return dataclasses.replace(strategy, **rounded)


def invert(column: np.ndarray, length: int) -> np.ndarray:
    """Returns the first `length` coefficients of the power series 1 / column, by Newton's doubling."""
    column = np.asarray(column, np.float64)
    inverse = np.array([1 / column[0]])
    while len(inverse) < length:
        size = min(2 * len(inverse), length)
        error = -convolve(column[:size], inverse, size)
        error[0] += 2
        inverse = convolve(inverse, error, size)
    return inverse[:length]


def convolve(a: np.ndarray, b: np.ndarray, length: int) -> np.ndarray:
    """Returns the first `length` coefficients of the product of two power series (zero-padded)."""
    a, b = a[:length], b[:length]
    if min(len(a), len(b)) <= 256:
        full = np.convolve(a, b)[:length]
        return np.concatenate([full, np.zeros(length - len(full))])
    size = 1 << (len(a) + len(b) - 2).bit_length()
    return np.fft.irfft(np.fft.rfft(a, size) * np.fft.rfft(b, size), size)[:length]


def _square_root(length: int) -> np.ndarray:
    steps = np.arange(1.0, length)
    return np.concatenate([[1.0], np.cumprod((steps - 0.5) / steps)])
