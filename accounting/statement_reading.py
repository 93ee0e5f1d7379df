"""A statement from its file, its numbers computed again where its mechanisms allow it."""

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from accounting import _checks, _json, conversions, evidence, guarantees, record, unnoised
from accounting.mechanisms import MatrixMechanism, PureDP, TreeAggregation
from accounting.statement import (
    PrivacyStatement,
    in_full,
    largest,
    no_guarantee_sentence,
    round_up,
    sentence_of,
)
from accounting.statement_schema import SCHEMA, SCHEMA_NAME, SCHEMA_VERSION
from accounting.strategies import BLT

PathLike = str | os.PathLike[str]
NAME = evidence.STATEMENT_FILE
_MOST_HEADER = 100_000_000  # bytes, of a safetensors file


def place(path: PathLike) -> pathlib.Path | None:
    """The statement's file for a file or folder; None for the folder of a run, whose record says more.

    FILE has FILE.privacy.json beside it, a folder has privacy.json inside, and a .json file may be one itself.
    """
    where = pathlib.Path(path)
    if where.is_dir():
        files = (record.MECHANISM_FILE, record.PARTICIPATION_FILE, record.STAGES_FILE)
        has_record = any((where / name).exists() for name in files)
        has_record |= any(where.glob(f"*/{record.MECHANISM_FILE}"))  # of stages, whose list was lost
        return None if has_record or not (where / NAME).is_file() else where / NAME
    if not where.is_file() or is_of_a_run(where):
        return None
    beside = where.with_name(f"{where.name}.{NAME}")
    if beside.is_file():
        return beside
    if where.suffix != ".json":
        raise ValueError(
            f"{where}: no statement {beside.name} is beside it; give that file or a run's folder"
        )
    return where


def is_of_a_run(path: PathLike) -> bool:
    """Whether this is the statement in a run's folder, whose record says more: the run may have gone on since."""
    where = pathlib.Path(path)
    files = (record.MECHANISM_FILE, record.PARTICIPATION_FILE, record.STAGES_FILE, "config.json")
    has_record = any((where.parent / name).exists() for name in files)
    return where.name == NAME and where.is_file() and has_record and place(where.parent) is None


def read(path: PathLike) -> PrivacyStatement:
    """Reads a statement; its mechanisms are composed again and must not give more than it says.

    Raises:
      ValueError: it is no statement of this version, or says less than its mechanisms give.
    """
    try:
        data = _json.text_of(pathlib.Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); give a statement or a run's folder") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA_NAME:
        raise ValueError(f'{path}: not a privacy statement (its "schema" must be "{SCHEMA_NAME}")')
    if data.get("version") != SCHEMA_VERSION:
        raise ValueError(
            f"{path}: version {data.get('version')!r} is not {SCHEMA_VERSION}; use a matching jaxpriv"
        )
    if missing := [name for name in SCHEMA["required"] if name not in data]:
        raise ValueError(f"{path}: the statement lacks {', '.join(missing)}; it is damaged")
    try:
        _check(data)
        found = PrivacyStatement(data)
        found.markdown()  # whatever has another form than the schema's shows here
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: the statement is damaged or was changed ({error})") from None
    return found


def _check(data: Mapping[str, Any]) -> None:
    """Refuses numbers below those that the described mechanisms give, and a sentence that says otherwise than they.

    Numbers that no mechanisms were composed to, whose rho is null, are taken as they are.
    """
    histories = [data["mechanisms"], *data.get("alternatives", [])]
    if any(not one for one in histories) and (data["rho"] is not None or len(histories) > 1):
        raise ValueError("it states numbers that no mechanism gives")
    kinds = {m["kind"] for one in histories for m in one}
    if data["epsilon"] is None:
        if kinds:
            raise ValueError("its mechanisms give an epsilon, and it says none")
        if data["sentence"] != no_guarantee_sentence(data["unit"], data["not_covered"]):
            raise ValueError("its sentence is not the one for no guarantee")
        return
    _check_numbers(data, histories, kinds)
    if data["epsilon_printed"] != round_up(float(data["epsilon"])):
        raise ValueError(f"epsilon {data['epsilon']} is printed as {data['epsilon_printed']}")
    _check_sentence(data)


def _check_numbers(data: Mapping[str, Any], histories: Sequence[Sequence[Any]], kinds: set[str]) -> None:
    """Refuses numbers below those that the mechanisms give; of a mixture, below those of its Gaussian part."""
    _checks.adjacency(data["adjacency"])
    if not kinds:
        return
    delta = data["delta"] - data.get("approximation", 0.0)
    for m in data["mechanisms"]:
        if "noise_multiplier" in m and "squared_sensitivity" in m:
            least = guarantees.rho_from_sensitivity(
                float(m["squared_sensitivity"]), float(m["noise_multiplier"])
            )
            if not float(m["rho"]) >= least * (1 - 1e-6):
                raise ValueError(f"a {m['kind']} says rho {m['rho']}, and its noise gives {least:g}")
            squared = _least_squared(m, data)
            if not float(m["squared_sensitivity"]) >= squared * (1 - 1e-6):
                raise ValueError(
                    f"a {m['kind']} says a squared sensitivity of {m['squared_sensitivity']}, and its rounds and "
                    f"participations give {squared:g}"
                )
    seen = (data.get("observed") or {}).get("rho")
    if seen is not None and not float(data["rho"]) >= float(seen) * (1 - 1e-6):
        raise ValueError(f"it says rho {data['rho']}, and what was observed gives {seen}")
    if kinds == {"PureDP"}:
        found = largest([[_pure(m, data) for m in one] for one in histories], delta=delta)
        given = {"epsilon": found.epsilon, "rho": found.rho}
    else:
        rho = math.fsum(float(m["rho"]) for m in data["mechanisms"] if m["kind"] != "PureDP")
        given = {"rho": rho, "epsilon": conversions.epsilon_from_rho(rho, delta=delta, known="gaussian")}
    for name, value in given.items():
        # Another version may compose a little less tightly: only what says too little is wrong, or what is not theirs.
        if not float(data[name]) >= value * (1 - 1e-6) or (value == 0 and float(data[name]) > 0):
            raise ValueError(f"it says {name} {data[name]}, and its mechanisms give {value:g}")


def _least_squared(m: Mapping[str, Any], data: Mapping[str, Any]) -> float:
    """The squared sensitivity that a described mechanism has; 0 where the description does not hold its strategy."""
    rounded = m["kind"] in ("DistributedDiscreteGaussian", "SecureAggregation")
    inflation = max(1.0, float(m["inflation"])) if rounded else 1.0  # rounding never makes a bound smaller
    if m["kind"] == "DistributedDiscreteGaussian":
        return inflation**2 * m["max_participations"]
    about: dict[str, Any] = {name: m[name] for name in ("num_rounds", "min_separation", "max_participations")}
    about |= {"noise_multiplier": 1.0}  # which the sensitivity does not depend on
    about |= {"restarts": tuple(m["restarts"]), "adjacency": data["adjacency"], "unit": data["unit"]}
    if "completion" in m or m["kind"] == "TreeAggregation":
        inner = TreeAggregation(**about, completion=m["completion"])
    elif "theta" in m:
        inner = MatrixMechanism(**about, strategy=BLT(theta=np.array(m["theta"]), omega=np.array(m["omega"])))
    else:
        return 0.0
    return inflation**2 * guarantees.sensitivity_of(inner).squared


def _check_sentence(data: Mapping[str, Any]) -> None:
    """Refuses a sentence of other numbers, or one that is of a simulation where the statement is not."""
    said, delta = data["sentence"], float(data["delta"])
    # Earlier versions cut a delta to six digits in the sentence; the number beside it was always whole.
    deltas = (in_full(delta), f"{delta:g}")
    if data["mechanisms"]:
        right = sentence_of(data)
        for form in (right.replace(f", {deltas[0]})", f", {one})", 1) for one in deltas):
            if said == form or said.startswith(f"{form.removesuffix('.')}; the guarantee does not cover "):
                return
        raise ValueError(f"its sentence is not that of its numbers, which is: {right}")
    printed = data["epsilon_printed"]
    numbers = [f"Each {data['unit']} has ({printed}, {one})-differential privacy " for one in deltas]
    simulation = bool(data["simulation"])
    if said.startswith("Simulation") != simulation or not any(form in said for form in numbers):
        raise ValueError("its sentence is not that of its numbers")


def _pure(mechanism: Mapping[str, Any], data: Mapping[str, Any]) -> PureDP:
    return PureDP(
        epsilon=float(mechanism["epsilon_of_one_release"]),
        releases=mechanism["releases"],
        bounded_range=mechanism["bounded_range"],
        adjacency=data["adjacency"],
        unit=data["unit"],
    )


def finished(paths: Sequence[PathLike], claims: Mapping[str, Any]) -> PrivacyStatement | None:
    """The statement that the only one of `paths` has; None where all are runs.

    Args:
      claims: what is asked to be stated instead, by option; only a run's record can support it.

    Raises:
      ValueError: a statement among several paths, which cannot be composed with them; a claim about one.
    """
    found = []
    for path in paths:
        without = unnoised.statement_of(path)
        where = None if without else place(path)
        if without or where:
            found.append((path, where, without))
    if not found:
        return None
    if len(paths) > 1:
        raise ValueError(
            f"{found[0][0]} has a finished statement, which is reported alone; runs are composed"
        )
    if given := [name for name, value in claims.items() if value not in (None, "enforced")]:
        raise ValueError(f"{found[0][0]} has a finished statement: {', '.join(given)} needs a run's folder")
    path, where, without = found[0]
    if where is None:
        return without
    statement = read(where)
    if os.path.isdir(path):
        evidence.require_all_stated(path, (statement.data["observed"] or {}).get("num_rounds"))
    else:
        _require_own(pathlib.Path(path), where, statement)
    return statement


def _require_own(path: pathlib.Path, where: pathlib.Path, statement: PrivacyStatement) -> None:
    """Refuses another file's statement beside a model that holds its own (safetensors, metadata "privacy")."""
    if path == where or path.suffix != ".safetensors":
        return
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(min(size, _MOST_HEADER))
    try:
        own = json.loads(json.loads(header)["__metadata__"]["privacy"])
    except KeyError:
        return  # a model of another kind, which holds none
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error}); export it again") from None
    if own != statement.data:
        said = own.get("sentence") if isinstance(own, dict) else own
        raise ValueError(f"{where} is not the statement of {path}, which holds its own: {said}")
