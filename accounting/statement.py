"""The guarantee in words and JSON: what an analyst publishes, with everything it rests on.

`statement(...)` gives a `PrivacyStatement`; `.data` follows `SCHEMA` (versioned), `.markdown()` says the same
in words and `.sentence` is the one to quote. What is and is not covered follows appendix A of Xu et al. 2023
(arXiv:2305.18465). Numbers are rounded up, never down.
"""

import dataclasses
import decimal
import json
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from accounting import guarantees
from accounting.mechanisms import (
    DistributedDiscreteGaussian,
    MatrixMechanism,
    Mechanism,
    PureDP,
    QuantileEstimation,
    SecureAggregation,
    TreeAggregation,
)
from accounting.statement_schema import SCHEMA_NAME, SCHEMA_VERSION
from accounting.strategies import BLT, Dense

ADJACENCY_WORDS = {
    "zero-out": "one {unit}'s every message replaced by zero",
    "add-remove": "one {unit} added or removed",
    "replace-one": "one {unit}'s contribution replaced by another",
}
COVERED = (
    "every noised sum that was released and everything computed from them",
    "all intermediate models, also those sent to devices, and the final one",
    "any stopping round that does not depend on unreleased data",
)
NOT_COVERED = (
    "hyperparameter tuning on the same devices",
    "the choice of a checkpoint, or the decision to stop, by metrics of the devices' data",
    "evaluation metrics computed on devices' data",
    "data used for pretraining and for the vocabulary, unless it is public",
    "a server that deviates from the mechanism (the guarantee is central)",
    "several devices of one user (use group privacy: rho grows with the square of their number)",
)
ASSUMPTIONS = (
    "the server implements clipping, noise and release as described, with a secret noise key",
    "who takes part, and who reports first, does not depend on the content of devices",
    "each device respects the participation limits",
)
SHARES = (
    "every reporting device adds its share of the noise, also in the neighbouring run; who knows some devices' shares "
    "faces less noise"
)
REAL_ARITHMETIC = (
    "assumes real arithmetic: floating-point noise leaves gaps between its values, and what the rounding of noise and "
    "sums may tell is not accounted"
)
DOCUMENT_COVERED = ("the released outputs and everything computed from them",)
DOCUMENT_NOT_COVERED = (
    "which documents were released, their number and each one's number of sentences",
    "hyperparameter choice on private documents",
    "anything else that is published about the same documents",
)
DOCUMENT_ASSUMPTIONS = (
    "candidates, projections and encoders come from public data",
    "selection keys are secret and come from the operating system",
)
NO_AMPLIFICATION = "no amplification by sampling or shuffling is claimed"


def round_up(value: float, digits: int = 4) -> str:
    """Returns `value` in decimal, rounded up at `digits` places ("inf" and tiny values stay readable)."""
    if not math.isfinite(value):
        return "inf" if value > 0 else str(value)
    exact = decimal.Decimal(repr(float(value)))  # the shortest decimal that means this float
    if exact == 0:
        return "0"
    # Values below the last place keep two significant digits instead of turning into 0.0001.
    places = max(digits, 1 - exact.adjusted()) if exact.adjusted() < -digits + 1 else digits
    step = decimal.Decimal(1).scaleb(-places)
    with decimal.localcontext(prec=400):
        rounded = exact.quantize(step, rounding=decimal.ROUND_CEILING)
    if rounded and rounded.adjusted() < -6:
        return f"{rounded.normalize():e}".replace("E", "e")
    return f"{rounded:f}"


def in_full(value: float) -> str:
    """Returns `value` as the shortest decimal that means it: a delta cut to a few digits would promise more."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(float(value))


@dataclasses.dataclass(frozen=True)
class PrivacyStatement:
    """A statement; `data` is JSON-ready and follows `SCHEMA` (infinities are the text "inf")."""

    data: Mapping[str, Any]

    @property
    def sentence(self) -> str:
        """The one sentence to quote."""
        return self.data["sentence"]

    def json(self) -> str:
        """Returns the statement as text for privacy.json."""
        return json.dumps(self.data, indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    def markdown(self) -> str:
        """Returns the statement in words for privacy.md."""
        from accounting.statement_markdown import render

        return render(self.data)


def statement(
    mechanisms: Mechanism | Sequence[Mechanism],
    *,
    delta: float,
    clip_norm: float | None = None,
    report_goal: int | None = None,
    observed: Mapping[str, Any] | None = None,
    deployment: Mapping[str, Any] | None = None,
    simulation: bool = False,
    estimator: str | None = None,
    exceptions: Sequence[str] = (),
    covered: Sequence[str] = (),
    not_covered: Sequence[str] = (),
    assumptions: Sequence[str] = (),
    notes: Sequence[str] = (),
    alternatives: Sequence[Sequence[Mechanism]] = (),
    approximation: float = 0.0,
    details: Sequence[Mapping[str, Any]] = (),
) -> PrivacyStatement:
    """States what the mechanisms guarantee together.

    Args:
      mechanisms: what ran on the same units; they are composed.
      delta: where epsilon is stated; 0 for pure mechanisms.
      clip_norm: C, in the units of an update's L2 norm (the first one if it adapts).
      report_goal: devices a round.
      observed: what a run's record shows (`accounting.record`).
      deployment: what the same noise per client would mean elsewhere (`accounting.at_deployment`).
      simulation: True if the noise came from a public seed; the statement then begins with it.
      estimator: how prefix sums are formed from the noise, e.g. "Honaker"; post-processing.
      exceptions: what the headline itself must except, e.g. "the vocabulary".
      covered, not_covered, assumptions, notes: added to the standing ones.
      alternatives: what other units took part in instead, each composed by itself; rho and epsilon are the largest
        of any, so that they hold for every unit.
      approximation: the part of delta that goes to draws which are only near their exact laws; epsilon is that of
        the exact laws at the rest of delta.
      details: for each mechanism what else its reader should know: "part" (which run or stage it is of), its
        "clip_norm" and "report_goal", whose noise its multiplier is ("noise_on": updates, bits) and that of the
        "whole_noise_multiplier" that the release of both comes to.
    """
    parts = [mechanisms] if not isinstance(mechanisms, Sequence) else list(mechanisms)
    if not 0 <= approximation <= delta:
        raise ValueError(f"approximation must be from 0 to delta = {delta:g}, got {approximation!r}")
    found = largest([parts, *alternatives], delta=delta - approximation)._replace(delta=float(delta))
    federated = any(not isinstance(m, PureDP) for m in parts)
    standing = (
        (COVERED, NOT_COVERED, ASSUMPTIONS)
        if federated
        else (DOCUMENT_COVERED, DOCUMENT_NOT_COVERED, DOCUMENT_ASSUMPTIONS)
    )
    shares = [SHARES] if any(isinstance(m, DistributedDiscreteGaussian) for m in parts) else []
    # Pure mechanisms say so themselves where they add noise; shares are whole numbers.
    floating = any(not isinstance(m, (PureDP, DistributedDiscreteGaussian)) for m in parts)
    arithmetic = [REAL_ARITHMETIC] if floating else []
    words = ADJACENCY_WORDS.get(found.adjacency, "").format(unit=found.unit)
    data = {
        "schema": SCHEMA_NAME,
        "version": SCHEMA_VERSION,
        "simulation": bool(simulation),
        "sentence": "",
        "unit": found.unit,
        "adjacency": found.adjacency,
        "adjacency_in_words": words,
        "rho": found.rho,
        "epsilon": found.epsilon,
        "delta": found.delta,
        "epsilon_printed": round_up(found.epsilon),
        "conversion": found.how,
        "mechanisms": [
            describe(m) | dict(more) for m, more in zip(parts, details or [{}] * len(parts), strict=True)
        ],
        **({"alternatives": [[describe(m) for m in one] for one in alternatives]} if alternatives else {}),
        **({"approximation": approximation} if approximation else {}),
        "clip_norm": clip_norm,
        "report_goal": report_goal,
        "estimator": estimator,
        "observed": None if observed is None else dict(observed),
        "deployment": None if deployment is None else dict(deployment),
        "covered": [*standing[0], *covered],
        "not_covered": [*standing[1], *not_covered],
        "assumptions": [*standing[2], *shares, *arithmetic, *assumptions, NO_AMPLIFICATION],
        "notes": list(notes),
        "software": software(),
    }
    data["sentence"] = sentence_of(data, exceptions)
    return PrivacyStatement(jsonable(data))


def largest(histories: Sequence[Sequence[Mechanism]], *, delta: float) -> guarantees.Guarantee:
    """Returns the largest epsilon and the largest rho of units that took part in different things."""
    found = [guarantees.compose(parts, delta=delta) for parts in histories]
    for name in ("unit", "adjacency"):
        values = sorted({getattr(one, name) for one in found})
        if len(values) > 1:
            raise ValueError(f"cannot state mechanisms of unequal {name} together: {', '.join(values)}")
    most = max(found, key=lambda one: one.epsilon)
    return most._replace(rho=max(one.rho for one in found))


def no_guarantee(*, unit: str, reasons: Sequence[str], notes: Sequence[str] = ()) -> PrivacyStatement:
    """States that nothing is guaranteed (no noise, or encryption alone): epsilon is none."""
    if not reasons:
        raise ValueError("reasons must say why there is no guarantee")
    data = {
        "schema": SCHEMA_NAME,
        "version": SCHEMA_VERSION,
        "simulation": False,
        "sentence": no_guarantee_sentence(unit, reasons),
        "unit": unit,
        "adjacency": None,
        "adjacency_in_words": None,
        "rho": None,
        "epsilon": None,
        "delta": None,
        "epsilon_printed": "none",
        "conversion": None,
        "mechanisms": [],
        "clip_norm": None,
        "report_goal": None,
        "estimator": None,
        "observed": None,
        "deployment": None,
        "covered": [],
        "not_covered": list(reasons),
        "assumptions": [],
        "notes": list(notes),
        "software": software(),
    }
    return PrivacyStatement(jsonable(data))


def no_guarantee_sentence(unit: str, reasons: Sequence[str]) -> str:
    """The sentence where there is no guarantee."""
    return f"No differential privacy guarantee for any {unit} (epsilon: none): {'; '.join(reasons)}."


def sentence_of(data: Mapping[str, Any], exceptions: Sequence[str] = ()) -> str:
    """The sentence that a statement's numbers make."""
    rho, epsilon, delta = (float(data[name]) for name in ("rho", "epsilon", "delta"))
    rho_text, printed, unit = round_up(rho), data["epsilon_printed"], data["unit"]
    if all(m["kind"] == "PureDP" for m in data["mechanisms"]):
        kind = printed if delta == 0 else f"({printed}, {in_full(delta)})"
        text = (
            f"Each {unit} has {kind}-differential privacy "
            f"({data['adjacency']} adjacency: {data['adjacency_in_words']})"
        )
    else:
        text = (
            f"Each {unit} has ({printed}, {in_full(delta)})-differential privacy, that is {rho_text}-zCDP "
            f"({data['adjacency']} adjacency: {data['adjacency_in_words']}), "
            "over all its participations in the run"
        )
    if epsilon == math.inf:
        text = f"No finite guarantee (epsilon = inf) for any {unit}: no noise bounds what is released"
        if math.isfinite(rho) and delta == 0:
            text = (
                f"Each {unit} has {rho_text}-zCDP ({data['adjacency']} adjacency: {data['adjacency_in_words']}), "
                "over all its participations in the run, but no finite epsilon at delta = 0 "
                "(Gaussian noise is never pure: state it at a delta in (0, 1))"
            )
    if exceptions:
        text += f"; the guarantee does not cover {' or '.join(exceptions)}"
    if data["simulation"]:
        text = f"Simulation, no guarantee (the noise seed is public); with a secret key: {text}"
    return f"{text}."


def describe(mechanism: Mechanism) -> dict[str, Any]:
    """Returns a mechanism's parameters and cost, JSON-ready but for infinities."""
    if isinstance(mechanism, PureDP):
        return {
            "kind": "PureDP",
            "epsilon_of_one_release": mechanism.epsilon,
            "releases": mechanism.releases,
            "bounded_range": mechanism.bounded_range,
            "rho": guarantees.rho(mechanism),
        }
    if isinstance(mechanism, DistributedDiscreteGaussian):
        return {
            "kind": "DistributedDiscreteGaussian",
            "structure": "independent, discrete Gaussian shares",
            "noise_multiplier": mechanism.noise_multiplier,
            "num_rounds": mechanism.num_rounds,
            "min_separation": mechanism.separation,
            "rounds_between": mechanism.separation - 1,
            "max_participations": mechanism.participations,
            "restarts": [],
            "squared_sensitivity": mechanism.inflation**2 * mechanism.participations,
            "sensitivity_is_exact": False,
            "sensitivity_how": "inflated bound a round; rho corrects for sums of discrete Gaussians",
            "rho": guarantees.rho(mechanism),
            "scale": mechanism.scale,
            "dimension": mechanism.dimension,
            "beta": mechanism.beta,
            "inflation": mechanism.inflation,
            "tau": mechanism.tau,
        }
    inner: TreeAggregation | MatrixMechanism
    extra: dict[str, Any] = {}
    if isinstance(mechanism, QuantileEstimation):
        inner = mechanism.mechanism
        extra = {"count_stddev": mechanism.count_stddev, "bit_sensitivity": 0.5}
    elif isinstance(mechanism, SecureAggregation):
        inner = mechanism.mechanism
        extra = {
            "scale": mechanism.scale,
            "dimension": mechanism.dimension,
            "beta": mechanism.beta,
            "inflation": mechanism.inflation,
        }
    else:
        inner = mechanism
    found = guarantees.sensitivity_of(mechanism)
    result = {
        "kind": type(mechanism).__name__,
        "noise_multiplier": inner.noise_multiplier,
        "num_rounds": inner.num_rounds,
        "min_separation": inner.separation,
        "rounds_between": inner.separation - 1,
        "max_participations": inner.participations,
        "restarts": list(inner.restarts),
        "squared_sensitivity": found.squared,
        "sensitivity_is_exact": found.exact,
        "sensitivity_how": found.how,
        "rho": guarantees.rho(mechanism),
        **extra,
    }
    if isinstance(inner, TreeAggregation):
        return result | {"structure": "binary tree", "completion": inner.completion}
    strategy = inner.strategy
    result["structure"] = strategy.name
    if isinstance(strategy, BLT):
        result |= {"theta": strategy.theta.tolist(), "omega": strategy.omega.tolist()}
    elif isinstance(strategy, Dense):
        result["size"] = len(strategy.matrix)
    else:
        result["bands"] = int(np.flatnonzero(strategy.coefficients)[-1]) + 1
    return result


def software() -> dict[str, str]:
    """Returns the versions that computed the numbers."""
    import importlib.metadata as metadata

    found = {"python": platform.python_version()}
    for name in ("jaxpriv", "numpy", "scipy", "dp-accounting"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def jsonable(value: Any) -> Any:
    """Turns numpy numbers into python's and infinities into text; NaN cannot occur and is an error."""
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        if math.isnan(value):
            raise ValueError("a statement must not hold NaN")
        return float(value) if math.isfinite(value) else ("inf" if value > 0 else "-inf")
    return value
