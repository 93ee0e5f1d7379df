"""Options of `jaxpriv account`, one dataclass a command; the first line is its help."""

import dataclasses
from typing import Literal

from accounting.files import NAMES
from accounting.planning import PLANNED

Adjacency = Literal["zero-out", "add-remove", "replace-one"]
Method = Literal["exact", "pld", "rdp", "cks"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Output:
    json: bool = False
    """Print one JSON object as the last line of standard output; everything else goes to standard error."""
    plot: str | None = None
    """Draw the result into this file (.png, .pdf or .svg)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Schedule:
    adjacency: Adjacency
    """Which two runs are compared: one device's messages zeroed, added or removed, or replaced (rho x 4)."""
    delta: float
    """Where epsilon is stated, in (0, 1)."""
    min_separation: int | None = None
    """b: rounds t and t + b of one device are both allowed. Give this or --rounds-between."""
    rounds_between: int | None = None
    """Rounds strictly between two participations of one device (the Gboard paper's MinS), b - 1."""
    max_participations: int | None = None
    """Most rounds of one device; as many as the separation allows if left out."""
    restarts: tuple[int, ...] = ()
    """Rounds after which a new tree or a fresh strategy starts, increasing."""
    unit: str = "device"
    """Whom the guarantee protects."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Guarantee:
    count_stddev: float | None = None
    """Standard deviation of the noised count of clip bits (adaptive clipping); the total stays what z costs."""
    group_size: int = 1
    """Also state what a user with so many devices has."""
    method: Method = "exact"
    """How epsilon is found; pld, rdp and cks are looser and for comparison."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree(_Guarantee, _Schedule, _Output):
    """The guarantee of tree aggregation (DP-FTRL): sensitivity, rho, epsilon, statement."""

    noise_multiplier: float
    """z: standard deviation of the noise on a tree node divided by the clip norm."""
    rounds: int
    """Released rounds n."""
    completion: bool = False
    """Virtual leaves complete each tree; partly filled nodes count too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrix(_Guarantee, _Schedule, _Output):
    """The guarantee of a matrix mechanism: independent noise, square roots, BandMF, BLT or a file."""

    noise_multiplier: float
    """z: standard deviation of one underlying Gaussian divided by the clip norm."""
    rounds: int
    """Released rounds n."""
    strategy: str
    """independent, prefix, square_root, banded_square_root, banded_inverse_square_root, blt_closed_form, blt, bandmf,
    or a JSON file with {"coefficients": [..]}, {"theta": [..], "omega": [..]} or {"matrix": [[..]]}."""
    bands: int | None = None
    """Bands of a banded strategy (default: the separation)."""
    buffers: int = 4
    """Buffers of a BLT."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert(_Output):
    """Epsilon at delta from a rho, saying what is known of it."""

    delta: float
    """In [0, 1); 0 gives infinity."""
    rho: float | None = None
    """zCDP; give this or --pure-epsilon."""
    pure_epsilon: float | None = None
    """A pure epsilon to turn into zCDP first."""
    known: Literal["gaussian", "zcdp"]
    """gaussian: every release is Gaussian noise (exact). zcdp: only the bound is known (larger)."""
    bounded_range: bool = False
    """The pure epsilon is the exponential mechanism's: rho = epsilon^2 / 8 instead of / 2."""
    adjacency: Adjacency | None = None
    """The adjacency that rho was computed for, to be repeated in the sentence."""
    peers: bool = False
    """Also ask dp-accounting's PLD and RDP accountants (slower to start)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrate(_Guarantee, _Schedule, _Output):
    """The noise, rounds or separation that just meet a target."""

    knob: Literal["noise_multiplier", "num_rounds", "min_separation"] = "noise_multiplier"
    """What to find: the least noise, the most rounds or the least separation."""
    epsilon: float | None = None
    """Target epsilon at delta; give this or --rho."""
    rho: float | None = None
    """Target zCDP."""
    noise_multiplier: float | None = None
    """z, if it is not the knob."""
    rounds: int | None = None
    """Released rounds, if they are not the knob."""
    strategy: str = "tree"
    """tree, or a strategy as in `matrix`."""
    completion: bool = False
    """Virtual leaves complete each tree."""
    bands: int | None = None
    """Bands of a banded strategy (default: the separation)."""
    buffers: int = 4
    """Buffers of a BLT."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(_Output):
    """Which report goal, noise, separation and mechanism reach a target with so many devices."""

    population: int
    """Devices N that take turns; the separation is at most N / report goal."""
    report_goal: tuple[int, ...]
    """Devices a round to consider."""
    rounds: int
    """Released rounds n."""
    epsilon: float
    """Target."""
    delta: float
    """Where the target is meant."""
    adjacency: Adjacency
    """Which two runs are compared."""
    noise_multiplier: tuple[float, ...] = ()
    """Values of z to try beside the least that reaches the target."""
    mechanism: tuple[Literal["tree", "banded square root", "BandMF", "BLT", "independent"], ...] = (
        "tree",
        "banded square root",
        "BandMF",
        "BLT",
        "independent",
    )
    """Mechanisms to consider."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare(_Output):
    """Tree, square roots, BandMF, BLT and independent noise on one axis at one (n, b, k)."""

    rounds: int
    """Released rounds n."""
    noise_multiplier: float
    """z of the streaming Honaker tree that the others are held against."""
    adjacency: Adjacency
    """Which two runs are compared."""
    delta: float
    """Where epsilon is stated."""
    min_separation: int | None = None
    """b; give this or --rounds-between."""
    rounds_between: int | None = None
    """b - 1."""
    max_participations: int | None = None
    """k; as many as b allows if left out."""
    strategy: tuple[str, ...] = ()
    """Further strategies from JSON files, as in `matrix`."""
    closed_forms_only: bool = False
    """Leave out the strategies that need an optimizer (about a second)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(_Output):
    """The statement of a run from its folder alone (mechanism.json, participation.jsonl), or of a file beside it."""

    run_dir: tuple[str, ...]
    """Folder of the run; several folders over the same devices are composed. Or a released file with its
    .privacy.json beside it, or that."""
    observed: bool = False
    """State what the log shows instead of the enforced limits; nothing enforced it."""
    noise_multiplier: float | None = None
    """Claim this z: refused if the run had less."""
    min_separation: int | None = None
    """Claim this b: refused if the log shows less."""
    max_participations: int | None = None
    """Claim this k: refused if the log shows more."""
    deployment_report_goal: int | None = None
    """Also state what the same noise per client would mean at this report goal."""
    population: int | None = None
    """Devices of that deployment."""


NAMED = {
    Matrix: {"--strategy": NAMES},
    Calibrate: {"--strategy": ("tree", *NAMES)},
    Plan: {"--mechanism": PLANNED},
}
"""Options whose values are names of mechanisms, of each command; any spelling is taken (`accounting.options`)."""
