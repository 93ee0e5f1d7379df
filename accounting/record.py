"""What a federated run leaves behind so that its guarantee can be computed again, from files alone.

A run folder holds two files of this format. No text, norm or loss of any client is in them.

`mechanism.json`: the fields of `RunRecord`, written once before the first round (`write_mechanism`).

`participation.jsonl`: one line a released round, appended and flushed to disk BEFORE anything of that round
is released (`ParticipationLog.append`), so that a line that a crash tore off belongs to no release:

    {"round": 0, "devices": ["a", "b"], "failed": ["c"]}

- round: 0, 1, 2, ..; released rounds only (an abandoned round takes no leaf and no line).
- devices: ids (text or whole numbers) whose messages entered the sum, zero messages included.
- failed (optional): devices that downloaded the model but whose message is not in the sum. Their timers have
  started; they cost nothing and are not counted as participations.
- noise_multiplier (optional): what the round really used; a run whose settings changed must write it.

A run in several stages over the same devices has a folder of this kind for each, and in its own `stages.json` with
their names in order (`write_stages`); its guarantee is their composition.

A resumed run appends only rounds that are not there yet: what is in the log was released, or may have been. A repeated
line counts once if it is identical and is refused if it differs.

Other files that only a released round leaves are witnesses against a log that lost rounds (`accounting.evidence`).
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from accounting import _checks, _json, strategies
from accounting.guarantees import value_noise_multiplier
from accounting.mechanisms import (
    MOST_ROUNDS,
    DistributedDiscreteGaussian,
    MatrixMechanism,
    Mechanism,
    QuantileEstimation,
    SecureAggregation,
    TreeAggregation,
)
from accounting.participation_log import (
    PARTICIPATION_FILE,
    Observed,
    Participation,
    ParticipationLog,
    observe,
    plain,
    read_participation,
    sync_folder,
)

__all__ = [  # the format as a whole, whichever file of it
    "MECHANISM_FILE",
    "PARTICIPATION_FILE",
    "STAGES_FILE",
    "Observed",
    "Participation",
    "ParticipationLog",
    "RunRecord",
    "observe",
    "plain",
    "read_mechanism",
    "read_participation",
    "read_stages",
    "violation",
    "write_mechanism",
    "write_stages",
]

MECHANISM_FILE = "mechanism.json"
STAGES_FILE = "stages.json"
FORMAT, STAGES_FORMAT, VERSION = "jaxpriv-mechanism", "jaxpriv-stages", 1
MECHANISMS = ("none", "independent", "tree", "tree_reduced", "blt", "banded")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything about a run that its guarantee depends on, bar who took part when.

    mechanism: none, independent, tree, tree_reduced, blt or banded.
    noise_multiplier: z of the whole release (updates and clip bits together), as applied; 0 for `none`.
    num_rounds: planned released rounds.
    min_separation, max_participations: enforced limits b (rounds t and t + b both allowed) and k (None: as b
    allows). adjacency, delta, unit: what the guarantee is stated for.
    report_goal, population: devices a round, devices in all (None if unknown).
    restarts, completion: of the tree or strategy; restarts that the run has not reached change nothing.
    strategy: coefficients as applied (float32 values): {"theta": [..], "omega": [..]} for blt,
      {"coefficients": [..]} for banded, else None.
    clip: {"kind": "fixed" | "adaptive", "norm": C (the first one), "count_stddev": sigma_b or None} and, if
      adaptive, "quantile" and "learning_rate" for the reader; the updates' z_delta follows from z and
      sigma_b.
    secure_aggregation: {"scale", "dimension", "beta"} (and "bits" for the reader), or None. The scale belongs to
      the clip norm of `clip`. With "scale_follows_clip_norm": true the encoding is in units of the clip norm
      in force, so that rounding inflates the bound of every round by the same factor; adaptive clipping
      needs it. With "noise": "distributed" (independent noise, fixed clip norm) the clients add it in discrete
      Gaussian shares: "min_survivors" and "max_clients" of one sum.
    simulation: True if noise came from `--insecure-noise-seed`.
    vocabulary: "public", or "clients" if it was built from clients' text (not covered then).
    not_covered, notes: further lines for the statement.
    deployment: {"report_goal": .., "population": ..} for the section on deployment scale, or None; with "share" (of
      that report goal) where this run takes fewer devices a round than another over the same devices.
    stage: {"name": .., "of": [names in order]} where this is one of several runs over the same devices that only count
      together; else None.
    """

    mechanism: str
    noise_multiplier: float
    num_rounds: int
    min_separation: int
    max_participations: int | None
    adjacency: str
    delta: float
    report_goal: int
    clip: Mapping[str, Any]
    unit: str = "device"
    population: int | None = None
    restarts: Sequence[int] = ()
    completion: bool = False
    strategy: Mapping[str, Any] | None = None
    secure_aggregation: Mapping[str, Any] | None = None
    simulation: bool = False
    vocabulary: str = "public"
    not_covered: Sequence[str] = ()
    notes: Sequence[str] = ()
    deployment: Mapping[str, Any] | None = None
    stage: Mapping[str, Any] | None = None

    def __post_init__(self):
        _checks.choice("mechanism", self.mechanism, MECHANISMS)
        _checks.choice("vocabulary", self.vocabulary, ("public", "clients"))
        _checks.probability("delta", self.delta)
        _checks.integer("report_goal", self.report_goal, minimum=1)
        if self.population is not None:
            _checks.integer("population", self.population, minimum=1)
        if not isinstance(self.simulation, bool):
            raise ValueError(f"simulation must be true or false, got {self.simulation!r}")
        for name in ("clip", "strategy", "secure_aggregation", "deployment", "stage"):
            value = getattr(self, name)
            if not isinstance(value, Mapping) and (value is not None or name == "clip"):
                raise ValueError(f"{name} must be an object, got {value!r}")
        if not isinstance(self.restarts, Sequence) or isinstance(self.restarts, str):
            raise ValueError(f"restarts must be a list of rounds, got {self.restarts!r}")
        for r in self.restarts:
            _checks.integer("restarts", r, minimum=0)
        for name in ("not_covered", "notes"):
            value = getattr(self, name)
            listed = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
            if not listed or not all(isinstance(text, str) for text in value):
                raise ValueError(f"{name} must be a list of texts, got {value!r}")
        if self.stage is not None and not _is_stage(self.stage):
            raise ValueError(f"stage must have a name that is one of the names in `of`, got {self.stage!r}")
        _checks.choice("clip kind", self.clip.get("kind"), ("fixed", "adaptive"))
        _checks.finite("clip norm", self.clip.get("norm"), above=True)
        if self.mechanism == "none" and self.noise_multiplier != 0:
            raise ValueError(f"noise_multiplier must be 0 for mechanism none, got {self.noise_multiplier!r}")
        if _checks.integer("num_rounds", self.num_rounds, minimum=0) > MOST_ROUNDS:
            raise ValueError(f"num_rounds must be at most {MOST_ROUNDS:,}: give the planned rounds")
        self._check_secure_aggregation()
        self.mechanisms(0 if self.mechanism == "none" else self.num_rounds)  # refuses what has no account

    def _check_secure_aggregation(self) -> None:
        """Refuses what cannot be accounted together."""
        facts = self.secure_aggregation
        if self.mechanism == "none" or not facts:
            return
        noise, follows = facts.get("noise", "server"), facts.get("scale_follows_clip_norm", False)
        _checks.choice("secure_aggregation noise", noise, ("server", "distributed"))
        if not isinstance(follows, bool):
            raise ValueError(f"scale_follows_clip_norm must be true or false, got {follows!r}")
        if self.clip["kind"] == "adaptive" and not follows:
            raise ValueError(
                "secure_aggregation cannot be accounted with adaptive clipping (rounding inflates each round's "
                "clip norm differently, and only the first is recorded): let the scale follow the clip norm, or use "
                "a fixed clip norm"
            )
        if noise == "distributed" and (self.mechanism != "independent" or self.clip["kind"] != "fixed"):
            raise ValueError(
                "distributed noise is independent every round and serves a fixed clip norm, got mechanism "
                f"{self.mechanism} and clip {self.clip['kind']}"
            )

    def mechanisms(self, num_rounds: int) -> list[Mechanism]:
        """Returns what ran in the first `num_rounds` rounds: the updates' mechanism, and the bits' if any."""
        z, sigma_b = self.noise_multiplier, self.clip.get("count_stddev")
        if (self.clip["kind"] == "adaptive") != (sigma_b is not None) and self.mechanism != "none":
            raise ValueError("clip needs count_stddev if and only if its kind is adaptive")
        value = (
            z
            if sigma_b is None or self.mechanism == "none"
            else value_noise_multiplier(z, count_stddev=sigma_b)
        )
        common: dict[str, Any] = {
            "noise_multiplier": value,
            "num_rounds": num_rounds,
            "min_separation": self.min_separation,
            "max_participations": self.max_participations,
            "restarts": tuple(r for r in self.restarts if r < num_rounds),
            "adjacency": self.adjacency,
            "unit": self.unit,
        }
        if self.mechanism in ("none", "tree", "tree_reduced"):
            updates: Mechanism = TreeAggregation(**common, completion=self.completion)
        else:
            updates = MatrixMechanism(**common, strategy=self._strategy())
        parts: list[Mechanism] = [updates]
        if sigma_b is not None and self.mechanism != "none":
            parts.append(QuantileEstimation(count_stddev=sigma_b, schedule=updates))
        if self.secure_aggregation is not None:
            facts = self.secure_aggregation
            names = ["scale", "dimension", "beta"]
            shared = facts.get("noise") == "distributed" and self.mechanism == "independent"
            names += ["min_survivors", "max_clients"] if shared else []
            if missing := sorted(set(names) - set(facts)):
                raise ValueError(f"secure_aggregation lacks {', '.join(missing)}")
            rounding: dict[str, Any] = {"clip_norm": self.clip["norm"]} | {n: facts[n] for n in names}
            if shared:
                parts[0] = DistributedDiscreteGaussian(**common, **rounding)
            else:
                parts[0] = SecureAggregation(mechanism=updates, **rounding)
        return parts

    def _strategy(self) -> strategies.Strategy:
        if self.mechanism == "independent":
            return strategies.independent()
        given = self.strategy or {}
        try:
            if self.mechanism == "blt":
                return strategies.BLT(given["theta"], given["omega"])
            return strategies.Toeplitz(given["coefficients"], "banded")
        except KeyError as missing:
            raise ValueError(f"strategy of mechanism {self.mechanism} lacks {missing}") from None


def _is_stage(stage: Mapping[str, Any]) -> bool:
    names = stage.get("of")
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        return False
    return stage.get("name") in names


def write_mechanism(run_dir: str | os.PathLike[str], record: RunRecord) -> None:
    """Writes `mechanism.json`, whole or not at all."""
    data = {"format": FORMAT, "version": VERSION} | dataclasses.asdict(record)
    _write(pathlib.Path(run_dir) / MECHANISM_FILE, data)


def write_stages(
    run_dir: str | os.PathLike[str], stages: Sequence[str], *, begun: Sequence[str] = ()
) -> None:
    """Writes `stages.json`: the folders, inside `run_dir`, of stages that run one after the other.

    Args:
      begun: those that are about to release, or have: without their folders nothing is stated any more.
    """
    data = {"format": STAGES_FORMAT, "version": VERSION, "stages": list(stages), "begun": list(begun)}
    _write(pathlib.Path(run_dir) / STAGES_FILE, data)


def _write(path: pathlib.Path, data: Any) -> None:
    aside = path.with_name(path.name + ".partial")
    with aside.open("w", encoding="utf-8") as file:
        file.write(json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False, default=plain) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync_folder(path.parent)


def read_stages(run_dir: str | os.PathLike[str]) -> list[str] | None:
    """The names of a run's stages in order; None where it has none.

    Raises:
      ValueError: the file is damaged, or a stage is missing before one that has begun.
    """
    path = pathlib.Path(run_dir) / STAGES_FILE
    if not path.exists():
        return None
    data = _load(path)
    stages = data.get("stages") if isinstance(data, dict) else None
    if not isinstance(data, dict) or data.get("format") != STAGES_FORMAT or data.get("version") != VERSION:
        raise ValueError(
            f'{path}: not a list of stages (its "format" must be "{STAGES_FORMAT}", version {VERSION})'
        )
    plain = isinstance(stages, list) and all(isinstance(s, str) and pathlib.Path(s).name == s for s in stages)
    if not plain or not stages or len(set(stages)) < len(stages):
        raise ValueError(
            f"{path}: stages must be different names of folders inside the run's, got {stages!r}"
        )
    begun = [(pathlib.Path(run_dir) / name / MECHANISM_FILE).exists() for name in stages]
    logged = [(pathlib.Path(run_dir) / name / PARTICIPATION_FILE).exists() for name in stages]
    told = data.get("begun", [])
    released = [log or name in told for log, name in zip(logged, stages)]
    if any(out and not written for out, written in zip(released, begun)) or sorted(begun)[::-1] != begun:
        lost = stages[begun.index(False)]
        raise ValueError(
            f"{path}: {lost} has no {MECHANISM_FILE}; what it released would be left out, so nothing is stated"
        )
    return stages


def read_mechanism(run_dir: str | os.PathLike[str]) -> RunRecord:
    """Reads and checks `mechanism.json`; errors name the file and the field."""
    path = pathlib.Path(run_dir) / MECHANISM_FILE
    data = _load(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'{path}: not a run record (its "format" must be "{FORMAT}")')
    if data.get("version") != VERSION:
        raise ValueError(f"{path}: version {data.get('version')!r} is not {VERSION}; use a matching jaxpriv")
    fields = {f.name: f for f in dataclasses.fields(RunRecord)}
    given = {k: v for k, v in data.items() if k not in ("format", "version")}
    unknown = sorted(set(given) - set(fields))
    missing = sorted(n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in given)
    if unknown or missing:
        raise ValueError(f"{path}: unknown fields {unknown}, missing fields {missing}")
    try:
        return RunRecord(**given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _load(path: pathlib.Path) -> Any:
    try:
        with _json.refused(f"{path}", "a run record"):
            return _json.text_of(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no such file; give the folder of a run, or a released file with its statement"
        ) from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


def violation(record: RunRecord, participation: Participation) -> str | None:
    """Says in one line how the log breaks what the record states, or returns None.

    Less noise, less separation, more participations or more rounds than stated all void the statement.
    """
    seen = observe(participation)
    stated = record.noise_multiplier
    if participation.least_noise is not None and participation.least_noise < stated * (1 - 1e-9):
        return f"a round used noise multiplier {participation.least_noise:g}, less than the stated {stated:g}"
    if seen.min_separation is not None and seen.min_separation < record.min_separation:
        return (
            f"a device took part {seen.min_separation} rounds after its last time, "
            f"less than the stated min_separation {record.min_separation}"
        )
    if record.max_participations is not None and seen.max_participations > record.max_participations:
        return (
            f"a device took part {seen.max_participations} times, "
            f"more than the stated max_participations {record.max_participations}"
        )
    if seen.num_rounds > record.num_rounds:
        return f"{seen.num_rounds} rounds were released, more than the planned {record.num_rounds}"
    return None
