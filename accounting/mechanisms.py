"""Frozen descriptions of what ran. They compute nothing; `accounting.rho` and friends do.

Rounds are released steps (leaves), counted from 0. A participation class is given by exactly one of
`min_separation` b (rounds t and t + b of one device are both allowed) or `rounds_between` (rounds strictly
between two of them, the Gboard paper's MinS; b = rounds_between + 1), and by `max_participations` (None: as
many as b allows).
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from accounting import _checks, tree
from accounting.strategies import Dense, Strategy

# Parts of add-remove and zero-out runs differ by at most C, of replace-one runs by 2 C.
SENSITIVITY_FACTOR = {"zero-out": 1, "add-remove": 1, "replace-one": 2}
MOST_DIMENSIONS = 1 << 62
MOST_ROUNDS = 10**9  # more is a typing error: at one round a second it would take thirty years


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Correlated:
    """What every mechanism of a federated run has.

    noise_multiplier: z, the standard deviation of one underlying Gaussian divided by the clip norm.
    num_rounds: released rounds n.
    restarts: strictly increasing r < n; a new tree (or a fresh strategy) starts after r rounds.
    adjacency: zero-out (one device's messages become zero), add-remove (same numbers) or replace-one (rho x
    4).
    unit: whom the guarantee protects.
    """

    noise_multiplier: float
    num_rounds: int
    min_separation: int | None = None
    rounds_between: int | None = None
    max_participations: int | None = None
    restarts: Sequence[int] = ()
    adjacency: str
    unit: str = "device"

    def __post_init__(self):
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("noise_multiplier", _checks.real("noise_multiplier", self.noise_multiplier))
        put("num_rounds", _checks.integer("num_rounds", self.num_rounds, minimum=0))
        if self.num_rounds > MOST_ROUNDS:
            raise ValueError(f"num_rounds must be at most {MOST_ROUNDS:,}: give the released rounds")
        if (self.min_separation is None) == (self.rounds_between is None):
            raise ValueError(
                "give exactly one of min_separation (rounds t and t + b both allowed) and rounds_between "
                f"(rounds strictly between, b - 1), got {self.min_separation!r} and {self.rounds_between!r}"
            )
        if self.min_separation is not None:
            put("min_separation", _checks.integer("min_separation", self.min_separation, minimum=1))
        else:
            put("rounds_between", _checks.integer("rounds_between", self.rounds_between, minimum=0))
        if self.max_participations is not None:
            put(
                "max_participations",
                _checks.integer("max_participations", self.max_participations, minimum=1),
            )
        try:
            restarts = tuple(_checks.integer("restarts", r, minimum=0) for r in self.restarts)
        except TypeError:
            raise ValueError(f"restarts must be a list of rounds, got {self.restarts!r}") from None
        if any(a >= b for a, b in itertools.pairwise(restarts)):
            raise ValueError(f"restarts must be strictly increasing, got {list(restarts)}")
        if restarts and restarts[-1] >= self.num_rounds:
            raise ValueError(
                f"restarts must be below num_rounds = {self.num_rounds} (a tree needs a round), "
                f"got {restarts[-1]}"
            )
        put("restarts", restarts)
        _checks.adjacency(self.adjacency)
        if not isinstance(self.unit, str) or not self.unit:
            raise ValueError(f"unit must name whom the guarantee protects, got {self.unit!r}")

    @property
    def separation(self) -> int:
        """b, whichever way it was given."""
        if self.min_separation is not None:
            return self.min_separation
        return int(self.rounds_between or 0) + 1

    @property
    def participations(self) -> int:
        """The most participations that the class allows: min(k, ceil(n / b))."""
        possible = -(-self.num_rounds // self.separation)
        return possible if self.max_participations is None else min(self.max_participations, possible)

    @property
    def segments(self) -> list[int]:
        """Rounds of each tree (or fresh strategy)."""
        return tree.segments(self.num_rounds, self.restarts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeAggregation(_Correlated):
    """DP-FTRL's binary tree (Kairouz et al. 2021, arXiv:2103.00039); Honaker's estimator costs the same.

    completion: virtual leaves complete each tree before a restart, and partly filled nodes count too.
    """

    completion: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.completion, bool):
            raise ValueError(f"completion must be True or False, got {self.completion!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixMechanism(_Correlated):
    """Noise C^-1 w added to the clipped sums, C a lower-triangular `strategy` (accounting.strategies)."""

    strategy: Strategy

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.strategy, Strategy):
            raise ValueError(
                "strategy must come from accounting.strategies (Toeplitz, BLT, Dense or a closed form), "
                f"got {type(self.strategy).__name__}"
            )
        if isinstance(self.strategy, Dense):
            rows = len(self.strategy.matrix)
            if self.restarts:
                raise ValueError("a Dense strategy takes no restarts: put its blocks into one matrix")
            if rows < self.num_rounds:
                raise ValueError(
                    f"the Dense strategy has {rows} rows, fewer than num_rounds = {self.num_rounds}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantileEstimation:
    """The noised count of clip bits of adaptive clipping (Andrew et al. 2021, arXiv:1905.03871).

    count_stddev: sigma_b, the standard deviation of one underlying Gaussian added to the count. A bit enters
      as +-1/2, so its noise multiplier is 2 sigma_b.
    schedule: the mechanism that the updates go through; the bits take the same strategy, restarts and
      participation (its own noise multiplier is not used).
    """

    count_stddev: float
    schedule: TreeAggregation | MatrixMechanism

    def __post_init__(self):
        object.__setattr__(self, "count_stddev", _checks.real("count_stddev", self.count_stddev))
        if not isinstance(self.schedule, _Correlated):
            raise ValueError("schedule must be the TreeAggregation or MatrixMechanism of the updates")

    @property
    def mechanism(self) -> TreeAggregation | MatrixMechanism:
        """The equivalent mechanism for the bits."""
        return dataclasses.replace(self.schedule, noise_multiplier=2 * self.count_stddev)

    @property
    def unit(self) -> str:
        """Whom the guarantee protects."""
        return self.schedule.unit

    @property
    def adjacency(self) -> str:
        """The adjacency of the schedule."""
        return self.schedule.adjacency


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecureAggregation:
    """A mechanism whose clipped updates are scaled, rotated and rounded before the secure sum.

    Rounding inflates the L2 bound (Kairouz, Liu, Steinke 2021, arXiv:2102.06387); rho grows by its ratio
    squared.

    mechanism: noise_multiplier as usual: the noise's standard deviation over `clip_norm`.
    scale: s, updates are multiplied by it before rounding to integers.
    dimension: number of parameters (padded to a power of two for the rotation).
    beta: bias of conditional rounding; 0 for unconditional rounding and its worst-case bound.
    """

    mechanism: TreeAggregation | MatrixMechanism
    clip_norm: float
    scale: float
    dimension: int
    beta: float

    def __post_init__(self):
        if not isinstance(self.mechanism, _Correlated):
            raise ValueError("mechanism must be the TreeAggregation or MatrixMechanism that runs on the sums")
        for name in ("clip_norm", "scale"):
            object.__setattr__(self, name, _checks.finite(name, getattr(self, name), above=True))
        object.__setattr__(self, "dimension", _dimension(self.dimension))
        object.__setattr__(self, "beta", _checks.probability("beta", self.beta))

    @property
    def inflation(self) -> float:
        """Inflated bound over clip norm."""
        return inflated_norm(self.clip_norm, self.scale, self.dimension, self.beta) / self.clip_norm

    @property
    def unit(self) -> str:
        """Whom the guarantee protects."""
        return self.mechanism.unit

    @property
    def adjacency(self) -> str:
        """The adjacency of the mechanism."""
        return self.mechanism.adjacency


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedDiscreteGaussian(_Correlated):
    """Every client adds its share of discrete Gaussian noise before the secure sum (independent every round).

    noise_multiplier: z of the sum when only `min_survivors` clients' shares are in it; each share then has
      variance (z C)^2 / min_survivors. Sums of discrete Gaussians are not discrete Gaussian: the difference
      is accounted by the tau of Kairouz, Liu, Steinke 2021 (arXiv:2102.06387, theorem 1 and equation 17), as
      zCDP.
    clip_norm, scale, dimension, beta: of the rounding, as in SecureAggregation.
    min_survivors, max_clients: fewest and most clients whose shares may be in one sum.
    """

    clip_norm: float
    scale: float
    dimension: int
    beta: float
    min_survivors: int
    max_clients: int

    def __post_init__(self):
        super().__post_init__()
        if self.adjacency == "add-remove":
            raise ValueError(
                "adjacency: a unit that is absent adds no share of the noise, so add-remove is not served; use "
                "zero-out or replace-one, where its share stays"
            )
        if self.restarts:
            raise ValueError(
                "noise of the distributed discrete Gaussian is fresh every round: restarts must be ()"
            )
        for name in ("clip_norm", "scale"):
            object.__setattr__(self, name, _checks.finite(name, getattr(self, name), above=True))
        object.__setattr__(self, "dimension", _dimension(self.dimension))
        for name in ("min_survivors", "max_clients"):
            object.__setattr__(self, name, _checks.integer(name, getattr(self, name), minimum=1))
        object.__setattr__(self, "beta", _checks.probability("beta", self.beta))
        if self.max_clients < self.min_survivors:
            raise ValueError(f"max_clients must be at least min_survivors, got {self.max_clients}")

    @property
    def inflation(self) -> float:
        """Inflated bound over clip norm."""
        return inflated_norm(self.clip_norm, self.scale, self.dimension, self.beta) / self.clip_norm

    @property
    def tau(self) -> float:
        """10 sum over k < clients of exp(-2 pi^2 v k / (k + 1)), v a share's variance on the grid."""
        share = (self.noise_multiplier * self.clip_norm * self.scale) ** 2 / self.min_survivors
        return 10 * math.fsum(
            math.exp(-2 * math.pi**2 * share * k / (k + 1)) for k in range(1, self.max_clients)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PureDP:
    """Releases with a pure epsilon each, such as private document embeddings.

    epsilon: of one release.
    releases: how many releases the unit takes part in; pure epsilons add.
    bounded_range: True only for the true exponential mechanism, whose zCDP is epsilon^2 / 8 instead of / 2;
      permute-and-flip, Laplace and word-level mechanisms are False.
    """

    epsilon: float
    releases: int = 1
    bounded_range: bool = False
    adjacency: str
    unit: str

    def __post_init__(self):
        object.__setattr__(self, "epsilon", _checks.real("epsilon", self.epsilon))
        object.__setattr__(self, "releases", _checks.integer("releases", self.releases, minimum=0))
        if not isinstance(self.bounded_range, bool):
            raise ValueError(f"bounded_range must be True or False, got {self.bounded_range!r}")
        _checks.adjacency(self.adjacency)
        if not isinstance(self.unit, str) or not self.unit:
            raise ValueError(f"unit must name whom the guarantee protects, got {self.unit!r}")


Mechanism = (
    TreeAggregation
    | MatrixMechanism
    | QuantileEstimation
    | SecureAggregation
    | DistributedDiscreteGaussian
    | PureDP
)


def _dimension(value: int) -> int:
    dimension = _checks.integer("dimension", value, minimum=1)
    if dimension > MOST_DIMENSIONS:
        digits = len(str(dimension)) if dimension < 10**4000 else "thousands of"
        raise ValueError(f"dimension must be at most 2^62, got a number of {digits} digits")
    return dimension


def padded(dimension: int) -> int:
    """Returns the power of two that a rotation pads a vector to."""
    return 1 << (dimension - 1).bit_length()


def inflated_norm(clip_norm: float, scale: float, dimension: int, beta: float) -> float:
    """Returns the L2 bound after scaling, padded rotation, stochastic rounding and unscaling.

    min(C + g sqrt(D), sqrt(C^2 + g^2 D / 4 + sqrt(2 ln(1/beta)) g (C + g sqrt(D) / 2))) with g = 1 / scale;
    beta = 0 leaves the first, which needs no conditional rounding.
    """
    clip_norm = _checks.finite("clip_norm", clip_norm, above=True)
    step = 1 / _checks.finite("scale", scale, above=True)
    beta = _checks.probability("beta", beta)
    dimension = _dimension(dimension)
    root = math.sqrt(padded(dimension))
    always = clip_norm + step * root
    if beta == 0:
        return always
    tail = math.sqrt(-2 * math.log(beta)) * step * (clip_norm + step * root / 2)
    return min(always, math.sqrt(clip_norm**2 + (step * root) ** 2 / 4 + tail))
