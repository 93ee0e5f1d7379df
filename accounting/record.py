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

A resumed run may append a round again: identical lines count once, different ones are refused.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from accounting import _checks, strategies
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

MECHANISM_FILE, PARTICIPATION_FILE = "mechanism.json", "participation.jsonl"
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

    def __post_init__(self):
        _checks.choice("mechanism", self.mechanism, MECHANISMS)
        _checks.choice("vocabulary", self.vocabulary, ("public", "clients"))
        _checks.probability("delta", self.delta)
        _checks.integer("report_goal", self.report_goal, minimum=1)
        if self.population is not None:
            _checks.integer("population", self.population, minimum=1)
        if not isinstance(self.simulation, bool):
            raise ValueError(f"simulation must be true or false, got {self.simulation!r}")
        for name in ("clip", "strategy", "secure_aggregation", "deployment"):
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


class Participation(NamedTuple):
    """Who took part when; one entry of `devices` and `rounds` (int64) a participation.

    names: device ids, indexed by the numbers in `devices`.
    torn: whether an unfinished last line was left out.
    least_noise: the smallest noise_multiplier that a line states, or None.
    num_failed: timers started without a message in the sum.
    """

    num_rounds: int
    devices: np.ndarray
    rounds: np.ndarray
    names: list[Any]
    torn: bool
    least_noise: float | None
    num_failed: int


class Observed(NamedTuple):
    """Realised participation: least separation (None if no device came twice), counts, their histogram.

    histogram[c] is the number of devices that took part c times (c >= 1).
    """

    num_rounds: int
    num_devices: int
    min_separation: int | None
    max_participations: int
    histogram: dict[int, int]


def write_mechanism(run_dir: str | os.PathLike[str], record: RunRecord) -> None:
    """Writes `mechanism.json`, whole or not at all."""
    folder = pathlib.Path(run_dir)
    data = {"format": FORMAT, "version": VERSION} | dataclasses.asdict(record)
    aside = folder / (MECHANISM_FILE + ".partial")
    text = json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False, default=_plain) + "\n"
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, folder / MECHANISM_FILE)


def write_stages(run_dir: str | os.PathLike[str], stages: Sequence[str]) -> None:
    """Writes `stages.json`: the folders, inside `run_dir`, of stages that run one after the other."""
    folder = pathlib.Path(run_dir)
    aside = folder / (STAGES_FILE + ".partial")
    data = {"format": STAGES_FORMAT, "version": VERSION, "stages": list(stages)}
    aside.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    os.replace(aside, folder / STAGES_FILE)


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
    if any(log and not written for log, written in zip(logged, begun)) or sorted(begun)[::-1] != begun:
        lost = stages[begun.index(False)]
        raise ValueError(
            f"{path}: {lost} has no {MECHANISM_FILE}; what it released would be left out, so nothing is stated"
        )
    return stages


class ParticipationLog:
    """Appends rounds to `participation.jsonl`, readable by its owner only; each line is on disk when `append` returns.

    Opening it drops a torn last line and every line from `from_round` on, which a resumed run writes again.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, from_round: int = 0):
        self._path = pathlib.Path(run_dir) / PARTICIPATION_FILE
        kept = b""
        if self._path.exists():
            for number, line in enumerate(self._path.read_bytes().splitlines(keepends=True), 1):
                if not line.endswith(b"\n"):
                    break
                if _row(line, f"{self._path}, line {number}")[0] >= from_round:
                    break
                kept += line
        aside = self._path.with_name(PARTICIPATION_FILE + ".partial")
        aside.unlink(missing_ok=True)
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self._path)
        self._file = self._path.open("ab")

    def append(
        self,
        round: int,
        devices: Iterable[Any],
        *,
        failed: Iterable[Any] = (),
        noise_multiplier: float | None = None,
    ) -> None:
        """Records one round, before it is released."""
        line: dict[str, Any] = {"round": int(round), "devices": list(devices)}
        if failed := list(failed):
            line["failed"] = failed
        if noise_multiplier is not None:
            line["noise_multiplier"] = float(noise_multiplier)
        self._file.write(json.dumps(line, default=_plain, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _plain(value: Any) -> Any:
    """Numpy numbers and arrays as json knows them."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


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
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no such file; give the folder of a run, or a released file with its statement"
        ) from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"{path}: not a run record (nested too deeply)") from None


def read_participation(run_dir: str | os.PathLike[str]) -> Participation:
    """Reads `participation.jsonl`; a torn last line is left out, any other fault is named with its line."""
    path = pathlib.Path(run_dir) / PARTICIPATION_FILE
    numbers: dict[Any, int] = {}
    seen: list[np.ndarray] = []
    rest: list[dict[str, Any]] = []
    least_noise: float | None = None
    num_failed, torn = 0, False
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no such file: no round has been logged; resume the run, or give another folder"
        ) from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    last = len(lines)
    for number, line in enumerate(lines, 1):
        if not line and number == last:
            break
        if number == last:  # no newline at its end: the write was cut short, and its round not released
            torn = True
            break
        where = f"{path}, line {number}"
        index, devices, failed, row = _row(line, where)
        mine = np.array([numbers.setdefault(d, len(numbers)) for d in devices], np.int64)
        if index < len(seen):
            if not np.array_equal(np.sort(seen[index]), np.sort(mine)):
                raise ValueError(f"{where}: round {index} was recorded before with other devices")
            if other := _differing(rest[index], _rest(row)):
                raise ValueError(f"{where}: round {index} was recorded before with another {other}")
            continue
        if index > len(seen):
            raise ValueError(f"{where}: round {index} follows round {len(seen) - 1}; rounds are missing")
        seen.append(mine)
        rest.append(_rest(row))
        num_failed += len(failed)
        if "noise_multiplier" in row:
            noise = _checks.real(f"{where}: noise_multiplier", row["noise_multiplier"])
            least_noise = noise if least_noise is None else min(least_noise, noise)
    rounds = np.repeat(np.arange(len(seen)), [len(mine) for mine in seen])
    devices = np.concatenate([np.zeros(0, np.int64), *seen])
    return Participation(len(seen), devices, rounds, list(numbers), torn, least_noise, num_failed)


def _rest(row: dict[str, Any]) -> dict[str, Any]:
    """A line without its round and devices; the order of failed devices says nothing."""
    rest = {name: value for name, value in row.items() if name not in ("round", "devices", "failed")}
    return rest | {"failed": frozenset(row.get("failed", ()))}


def _differing(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """The first field in which two lines of one round differ, or None."""
    missing = object()
    names = (name for name in {**one, **other} if one.get(name, missing) != other.get(name, missing))
    return next(names, None)


def _row(line: bytes, where: str) -> tuple[int, list[Any], list[Any], dict[str, Any]]:
    """Reads and checks one line: its round, devices, failed ones, and the whole object."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"{where}: not a line of the log (nested too deeply)") from None
    if not isinstance(row, dict) or "round" not in row or "devices" not in row:
        raise ValueError(f'{where}: must be an object with "round" and "devices"')
    index = _checks.integer(f"{where}: round", row["round"], minimum=0)
    lists = []
    for name in ("devices", "failed"):
        ids = row.get(name, [])
        if not isinstance(ids, list) or not all(
            isinstance(i, (str, int)) and not isinstance(i, bool) for i in ids
        ):
            raise ValueError(f"{where}: {name} must be a list of ids (text or whole numbers)")
        if len(set(ids)) != len(ids):
            raise ValueError(f"{where}: {name} names a device twice in one round")
        lists.append(ids)
    if both := set(lists[0]) & set(lists[1]):
        raise ValueError(f"{where}: {next(iter(both))!r} is in both devices and failed; it can only be one")
    return index, lists[0], lists[1], row


def observe(participation: Participation) -> Observed:
    """Returns the realised separation and counts."""
    devices, rounds = participation.devices, participation.rounds
    if not len(devices):
        return Observed(participation.num_rounds, 0, None, 0, {})
    counts = np.bincount(devices)
    order = np.lexsort((rounds, devices))
    same = np.diff(devices[order]) == 0
    gaps = np.diff(rounds[order])[same]
    values, sizes = np.unique(counts[counts > 0], return_counts=True)
    return Observed(
        participation.num_rounds,
        int((counts > 0).sum()),
        int(gaps.min()) if len(gaps) else None,
        int(counts.max()),
        dict(zip(values.tolist(), sizes.tolist())),
    )


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
