"""What was released, as every file of a run's folder shows it: a statement never says less than any of them.

The record (`mechanism.json`, `participation.jsonl`) says what a run has cost. Files get lost, cut and edited, so the
record is believed only where nothing that a released round leaves behind contradicts it. Witnesses, all optional:

- `checkpoints/N`, a folder with `facts.json` or `digests.json`: N rounds were released;
- `metrics.jsonl`, lines with "round": t (from 0): t + 1 rounds were;
- `privacy.json`, an earlier statement: as many rounds as it observed, at no less than its rho;
- `checkpoints/N/facts.json` ("mechanism" and "settings") and `config.json`: what `mechanism.json` said at the start.

The log must hold every round that a witness shows, the record must say what they say, and no new statement may claim
less than the one in the folder. Whoever resumes, states, exports or scores a run asks here first.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from accounting import _json, record

PathLike = str | os.PathLike[str]
STATEMENT_FILE = "privacy.json"
_CHECKPOINTS, _FACTS, _METRICS, _SETTINGS = "checkpoints", "facts.json", "metrics.jsonl", "config.json"
# Field of the record: option of the run, where both are the same thing. Settings without all of them are others'.
_OPTIONS = {
    "mechanism": "mechanism",
    "noise_multiplier": "noise_multiplier",
    "num_rounds": "rounds",
    "report_goal": "report_goal",
    "adjacency": "adjacency",
    "delta": "delta",
    "restarts": "restarts",
    "completion": "completion",
}


class Shown(NamedTuple):
    """The most rounds that a witness shows to have been released, and its file; 0 where none shows any."""

    rounds: int
    file: pathlib.Path | None


def shown(run_dir: PathLike) -> Shown:
    """What the files beside the log show."""
    folder = pathlib.Path(run_dir)
    found = [Shown(0, None)]
    found += [Shown(int(place.name), place) for place in _checkpoints(folder)]
    found += [Shown(t + 1, folder / _METRICS) for t in _rounds_measured(folder / _METRICS)]
    if seen := (_statement(folder) or {}).get("observed"):
        found.append(Shown(seen["num_rounds"], folder / STATEMENT_FILE))
    return max(found, key=lambda one: one.rounds)


def sign_of_release(run_dir: PathLike) -> pathlib.Path | None:
    """A file from which it can be seen that something was released from this folder; None where there is none."""
    folder = pathlib.Path(run_dir)
    log = folder / record.PARTICIPATION_FILE
    if log.exists() and log.stat().st_size > 0:
        return log
    stated = folder / STATEMENT_FILE
    return shown(folder).file or (stated if stated.exists() else None)


def stages_of(run_dir: PathLike) -> list[str] | None:
    """The names of a run's stages in order; None where it has none.

    Raises:
      ValueError: the list is damaged; or the run's settings say that there is one, and it is gone.
    """
    found, folder = record.read_stages(run_dir), pathlib.Path(run_dir)
    asked = (_json.read_object(folder / _SETTINGS) or {}).get("clip")
    if found is None and asked == "two_stage" and not (folder / record.MECHANISM_FILE).exists():
        raise ValueError(
            f"{folder / record.STAGES_FILE} is missing, and {folder / _SETTINGS} is of a run in stages: one of them "
            "alone says too little; restore it"
        )
    if found is None:
        return None
    for place in sorted(folder.glob(f"*/{record.MECHANISM_FILE}")):
        if (stage_of(place.parent) or {}).get("of", found) != found:
            raise ValueError(
                f"{folder / record.STAGES_FILE} names {', '.join(found)}, and {place.parent} is a stage of the run "
                "too: what it released would be left out; restore the list"
            )
    return found


def stage_of(run_dir: PathLike) -> Mapping[str, Any] | None:
    """What a run's record says of itself as one of several stages: {"name", "of"}; None where it is none."""
    said = (_json.read_object(pathlib.Path(run_dir, record.MECHANISM_FILE)) or {}).get("stage")
    return said if isinstance(said, Mapping) else None


def checked_record(run_dir: PathLike) -> tuple[record.RunRecord, record.Participation]:
    """The record of a run, which all other files of its folder bear out.

    Raises:
      ValueError: it is damaged, has lost rounds or was changed; says which file shows it.
    """
    folder = pathlib.Path(run_dir)
    most = shown(folder)  # before the log is read: a run that goes on writes there first
    facts = record.read_mechanism(folder)
    log = folder / record.PARTICIPATION_FILE
    if log.exists() or not most.rounds:
        taken = record.read_participation(folder)
        if taken.num_rounds >= most.rounds:
            _require_unchanged(folder, facts)
            return facts, taken
    held = record.read_participation(folder).num_rounds if log.exists() else 0
    raise ValueError(
        f"{log} holds {held} of {most.rounds} rounds that were released, as {most.file} shows: it has lost rounds, "
        "and what leaves them out must not be stated; restore it, or account for every planned round (account tree)"
    )


def require_nothing_released(run_dir: PathLike) -> None:
    """Refuses a folder without a record from which something was released all the same."""
    if sign := sign_of_release(run_dir):
        raise ValueError(
            f"{pathlib.Path(run_dir, record.MECHANISM_FILE)} is missing, but rounds were released, as {sign} shows: "
            "what leaves them out must not be stated; restore it"
        )


def require_all_stated(run_dir: PathLike, num_rounds: int | None) -> None:
    """Refuses the statement of a folder that has no record left, if it is of fewer rounds than were released.

    Args:
      num_rounds: that it observed; None for one of something else than rounds.
    """
    most = shown(run_dir)
    if num_rounds is not None and most.rounds > num_rounds:
        raise ValueError(
            f"{pathlib.Path(run_dir, STATEMENT_FILE)} is of {num_rounds} of {most.rounds} rounds that were released, "
            f"as {most.file} shows, and the run's record is gone: restore {record.MECHANISM_FILE}"
        )


def require_no_less(run_dir: PathLike, rho: float | None, unit: str) -> None:
    """Refuses to state `rho` (None: no guarantee) for a folder whose own statement, of the same unit, says more.

    Raises:
      ValueError: what has been spent is never less than before, so one of the two is wrong, and it may be the new one.
    """
    earlier = _statement(pathlib.Path(run_dir))
    if earlier is None or rho is None or unit != earlier.get("unit"):
        return
    said = None if earlier["rho"] is None else float(earlier["rho"])
    if said is None or not rho >= said * (1 - 1e-6):
        words = "no guarantee" if said is None else f"rho {said:.6g}"
        raise ValueError(
            f"{pathlib.Path(run_dir, STATEMENT_FILE)} states {words}, and the record beside it only rho {rho:.6g}: "
            "what a run has spent never falls, so the record was lost or changed. Restore it; move that statement away "
            "only if it is known to say too much"
        )


def _checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """Folders of checkpoints, whole or damaged; none where they cannot be looked into."""
    try:
        found = [place for place in (folder / _CHECKPOINTS).iterdir() if place.name.isdecimal()]
        return [place for place in found if any((place / n).exists() for n in (_FACTS, "digests.json"))]
    except OSError:
        return []


def _rounds_measured(path: pathlib.Path) -> Iterator[int]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return
    for line in lines:
        row = _json.object_in(line)
        t = row.get("round") if row else None
        if isinstance(t, int) and not isinstance(t, bool) and t >= 0:
            yield t


def _statement(folder: pathlib.Path) -> dict[str, Any] | None:
    """The statement in a folder; None where there is none that can be read."""
    found = _json.read_object(folder / STATEMENT_FILE)
    if found is None or "rho" not in found:
        return None
    try:
        float(0 if found["rho"] is None else found["rho"])
        seen = found.get("observed")
        return found if seen is None or isinstance(seen["num_rounds"], int) else None
    except (TypeError, ValueError, KeyError, OverflowError):
        return None


def _require_unchanged(folder: pathlib.Path, facts: record.RunRecord) -> None:
    """Refuses a mechanism.json that says something else than what the run noted of it elsewhere."""
    now = json.loads(json.dumps(dataclasses.asdict(facts), default=record.plain))
    noted = [(place / _FACTS, _json.read_object(place / _FACTS) or {}) for place in _checkpoints(folder)]
    known = [
        (where, found["mechanism"]) for where, found in noted if isinstance(found.get("mechanism"), dict)
    ]
    settings = [(where, found.get("settings")) for where, found in noted]
    settings.append((folder / _SETTINGS, _json.read_object(folder / _SETTINGS)))
    known += [(where, found) for where, given in settings if (found := _as_record(given)) is not None]
    for where, then in known:
        for name in [name for name in now if name in then and now[name] != then[name]]:
            raise ValueError(
                f"{folder / record.MECHANISM_FILE} says {name} {_short(now[name])}, but the run began with "
                f"{_short(then[name])}, as {where} shows: one of the two was changed; restore it"
            )


def _as_record(settings: Any) -> dict[str, Any] | None:
    """What settings say of the record; None where they are not those of a run of this project."""
    if not isinstance(settings, Mapping) or not set(_OPTIONS.values()) <= settings.keys():
        return None
    found = {name: settings[option] for name, option in _OPTIONS.items()}
    if found["mechanism"] == "none":
        found["noise_multiplier"] = 0.0
    if settings.get("min_separation") is not None:
        found["min_separation"] = settings["min_separation"]
    if "insecure_noise_seed" in settings:
        found["simulation"] = settings["insecure_noise_seed"] is not None
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
