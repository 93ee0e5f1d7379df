"""A run's statement from its folder alone, and what its noise would mean at deployment scale."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from accounting import (
    _checks,
    conversions,
    evidence,
    guarantees,
    record,
    sensitivity,
    statement_reading,
    strategies,
)
from accounting.mechanisms import (
    SENSITIVITY_FACTOR,
    DistributedDiscreteGaussian,
    MatrixMechanism,
    Mechanism,
    QuantileEstimation,
    SecureAggregation,
    TreeAggregation,
)
from accounting.statement import PrivacyStatement, in_full, no_guarantee, round_up, statement

PathLike = str | os.PathLike[str]
DEPLOYMENT_REPORT_GOAL, DEPLOYMENT_POPULATION = 6500, 1_000_000
OF_EXACT_SUMS = (
    "This is of exact sums with Gaussian noise: secure aggregation of so many devices needs bits and a scale of its "
    "own, whose rounding would cost more."
)
MOST_DEPLOYED_ROUNDS = 100_000  # seconds at the default scale; far more rounds take hours


def at_deployment(
    mechanism: TreeAggregation | MatrixMechanism,
    *,
    report_goal: int,
    delta: float,
    deployment_report_goal: int = DEPLOYMENT_REPORT_GOAL,
    population: int = DEPLOYMENT_POPULATION,
) -> dict[str, Any]:
    """Returns what the same noise per client (z / m) would mean with many more devices a round.

    The deployment has z' = z x m' / m, the largest separation that its population allows, floor(N / m'), and
    the same rounds, restarts and strategy. It is no guarantee of the run at hand, and its sentence says so.

    Args:
      mechanism: what ran, with its total noise multiplier z.
      report_goal: m, devices a round of the run.
      deployment_report_goal, population: m' and N.
    """
    m = _checks.integer("report_goal", report_goal, minimum=1)
    goal = _checks.integer("deployment_report_goal", deployment_report_goal, minimum=1)
    population = _checks.integer("population", population, minimum=1)
    if population < goal:
        raise ValueError(f"population must be at least the report goal {goal}, got {population}")
    z = mechanism.noise_multiplier * goal / m
    there = dataclasses.replace(
        mechanism,
        noise_multiplier=z,
        min_separation=max_separation(population, goal),
        rounds_between=None,
        max_participations=None,
    )
    rho, eps = guarantees.rho(there), guarantees.epsilon(there, delta=delta)
    return {
        "report_goal": goal,
        "population": population,
        "noise_multiplier": z,
        "noise_per_client": mechanism.noise_multiplier / m,
        "num_rounds": there.num_rounds,
        "min_separation": there.separation,
        "max_participations": there.participations,
        "rho": rho,
        "epsilon": eps,
        "delta": delta,
        "sentence": (
            f"With {goal} devices a round out of {population}, the same noise per client "
            f"(z / m = {mechanism.noise_multiplier / m:.3g}, so z = {z:.4g}) over {there.num_rounds} rounds, "
            f"each device at most {there.participations} times and at least {there.separation} rounds apart, "
            f"would give ({round_up(eps)}, {in_full(delta)})-differential privacy, {round_up(rho)}-zCDP."
        ),
    }


def together_at_deployment(sections: Mapping[str, Mapping[str, Any]], *, delta: float) -> dict[str, Any]:
    """Returns what several runs over the same deployed devices would cost together: their rhos add.

    Args:
      sections: name of each run -> its `at_deployment`, all of one population; the figures of the last head the result,
        and those of each stand under `runs`.
    """
    populations = {section["population"] for section in sections.values()}
    if len(populations) != 1:
        raise ValueError(f"sections must be of one population to be composed, got {sorted(populations)}")
    rho = sum(float(section["rho"]) for section in sections.values())
    eps = conversions.epsilon_from_rho(rho, delta=delta, known="gaussian")
    each = " ".join(f"{name}: {section['sentence']}" for name, section in sections.items())
    return {
        **list(sections.values())[-1],
        "runs": dict(sections),
        "rho": rho,
        "epsilon": eps,
        "sentence": (
            f"{each} Together, over the same {populations.pop()} devices, of which one may take part in all: "
            f"({round_up(eps)}, {in_full(delta)})-differential privacy, {round_up(rho)}-zCDP."
        ),
    }


def max_separation(population: int, report_goal: int) -> int:
    """Returns the largest b that N devices and report goal m allow: floor(N / m) (b - 1 rounds between)."""
    population = _checks.integer("population", population, minimum=1)
    goal = _checks.integer("report_goal", report_goal, minimum=1)
    if population < goal:
        raise ValueError(f"population must be at least report_goal = {goal}, got {population}")
    return population // goal


def report(
    run_dir: PathLike | Sequence[PathLike],
    *,
    claim: str = "enforced",
    noise_multiplier: float | None = None,
    min_separation: int | None = None,
    max_participations: int | None = None,
    deployment_report_goal: int | None = None,
    population: int | None = None,
) -> PrivacyStatement:
    """Returns the statement of a run from its record, with both the enforced and the observed facts.

    Args:
      run_dir: a run's folder; several folders over the same devices are composed, and so are a run's stages. Or one
        file with its statement beside it (FILE.privacy.json), or that statement, which is checked and returned; the
        privacy.json in a run's folder stands for the folder.
        Whatever else is in the folder must bear the record out (`accounting.evidence`), or it is refused.
      claim: "enforced" states the worst case over the recorded limits, for the rounds released so far, and
        refuses (ValueError) if the log breaks them; "observed" states the worst case over the realised
        separation, count and least noise instead, and says that nothing enforced them.
      noise_multiplier, min_separation, max_participations: what the analyst wants stated; refused unless it
        is the noise that ran, and no more separation and no fewer participations than the chosen claim
        supports.
      deployment_report_goal, population: for the section on deployment scale, instead of the record's own.
    """
    _checks.choice("claim", claim, ("enforced", "observed"))
    folders = [run_dir] if isinstance(run_dir, (str, os.PathLike)) else list(run_dir)
    folders = [os.path.dirname(f) or "." if statement_reading.is_of_a_run(f) else f for f in folders]
    if not folders:
        raise ValueError("run_dir must name at least one folder")
    claims = {
        "claim": claim,
        "noise_multiplier": noise_multiplier,
        "min_separation": min_separation,
        "max_participations": max_participations,
        "deployment_report_goal": deployment_report_goal,
        "population": population,
    }
    written = statement_reading.finished(folders, claims)
    if written is not None:
        return written
    runs: list[_Stated] = []
    waiting: list[str] = []
    for folder, where, following in _with_stages(folders, waiting):
        facts, log = evidence.checked_record(folder)
        if following is not None and log.num_rounds < facts.num_rounds:
            raise ValueError(
                f"{os.path.join(folder, record.PARTICIPATION_FILE)} holds {log.num_rounds} of {facts.num_rounds} "
                f"rounds, but {following}, which follows it, has begun: the log has lost rounds, and a statement "
                "would leave them out"
            )
        if deployment_report_goal is not None or population is not None:
            wanted = {"report_goal": deployment_report_goal, "population": population}
            given = {**(facts.deployment or {}), **{k: v for k, v in wanted.items() if v is not None}}
            facts = dataclasses.replace(facts, deployment=given)
        facts, notes = _claimed(
            facts,
            log,
            claim=claim,
            where=where,
            noise_multiplier=noise_multiplier,
            min_separation=min_separation,
            max_participations=max_participations,
        )
        excepted = _exceptions(facts, claim) + _other_stages(facts, folder, folders)
        runs.append(_Stated(where, facts, log, notes, excepted, folder if claim == "enforced" else None))
    if not runs:
        stages, sign = os.path.join(folders[0], record.STAGES_FILE), evidence.sign_of_release(folders[0])
        told = f"but {sign} shows that some did: restore them" if sign else "so nothing was released"
        raise ValueError(f"{stages}: no stage of it has begun, {told}")
    runs[-1].notes.extend(waiting)
    found = _state(runs[0]) if len(runs) == 1 else _state_together(runs)
    if len(folders) == 1 and claim == "enforced":
        _require_no_less(folders[0], found)
    return found


def _require_no_less(folder: PathLike | None, found: PrivacyStatement) -> None:
    if folder is not None:
        evidence.require_no_less(folder, found.data["rho"], found.data["unit"])


class _Stated(NamedTuple):
    """One run, or stage of one, as it may be stated.

    excepted: what its headline must name as not covered. folder: whose own earlier statement it must not undercut.
    """

    where: str
    facts: record.RunRecord
    log: record.Participation
    notes: list[str]
    excepted: list[str]
    folder: PathLike | None


def _with_stages(folders: Sequence[PathLike], waiting: list[str]) -> list[tuple[PathLike, str, str | None]]:
    """Every folder with its name, a run in stages as its stages, each with the stage that has begun after it, if any;
    `waiting` gets a note for each not yet begun."""
    found = []
    for folder in folders:
        stages = evidence.stages_of(folder)
        if stages is None:
            found.append((folder, os.fspath(folder), None))
            continue
        prefix = "" if len(folders) == 1 else f"{os.fspath(folder)}/"
        begun = [n for n in stages if os.path.exists(os.path.join(folder, n, record.MECHANISM_FILE))]
        for name, following in zip(begun, [*begun[1:], None]):
            found.append((os.path.join(folder, name), prefix + name, following))
        for name in set(stages) - set(begun):
            evidence.require_nothing_released(os.path.join(folder, name))
        waiting += [f"{prefix}{n} has not begun; nothing of it is stated" for n in stages if n not in begun]
    return found


def _claimed(
    facts: record.RunRecord,
    log: record.Participation,
    *,
    claim: str,
    where: str,
    noise_multiplier: float | None,
    min_separation: int | None,
    max_participations: int | None,
) -> tuple[record.RunRecord, list[str]]:
    """The facts with the limits that may be stated, or a refusal."""
    notes = list(facts.notes)
    if log.num_rounds < facts.num_rounds:
        notes.append(
            f"the log holds {log.num_rounds} of {facts.num_rounds} planned rounds; only these are stated, and a log "
            "that lost rounds states too little"
        )
    if facts.mechanism == "none":
        return facts, notes
    broken = record.violation(facts, log)
    if broken and claim == "enforced":
        raise ValueError(
            f"{where}: {broken}; the enforced guarantee does not hold. Ask for the observed one (--observed)"
        )
    if claim == "observed":
        seen = record.observe(log)
        rounds = max(log.num_rounds, 1)
        # A recorded noise of 0 is the least there is, so only None means "not recorded".
        least = facts.noise_multiplier if log.least_noise is None else log.least_noise
        facts = dataclasses.replace(
            facts,
            noise_multiplier=min(facts.noise_multiplier, least),
            num_rounds=rounds,
            min_separation=seen.min_separation or rounds,
            max_participations=max(seen.max_participations, 1),
            restarts=[r for r in facts.restarts if r < rounds],
        )
        notes.append(
            "the limits are what the participation log shows; nothing enforced them"
            + (f" (the record's own limits were broken: {broken})" if broken else "")
        )
    if log.torn:
        notes.append("the log's last line was cut short; its round had not been released and is not counted")
    z, b = facts.noise_multiplier, facts.min_separation
    k = facts.max_participations or -(-facts.num_rounds // b)
    if noise_multiplier is not None:
        wanted = _checks.real("noise_multiplier", noise_multiplier)
        if abs(wanted - z) > 1e-9 * z:
            raise ValueError(f"{where}: cannot state noise multiplier {wanted:g}: the run used {z:g}")
    if min_separation is not None:
        wanted = _checks.integer("min_separation", min_separation, minimum=1)
        if wanted > b:
            raise ValueError(f"{where}: cannot state min_separation {wanted}: the {claim} one is {b}")
        facts = dataclasses.replace(facts, min_separation=wanted, max_participations=k)
    if max_participations is not None:
        wanted = _checks.integer("max_participations", max_participations, minimum=1)
        if wanted < k:
            raise ValueError(f"{where}: cannot state max_participations {wanted}: the {claim} one is {k}")
        facts = dataclasses.replace(facts, max_participations=wanted)
    return facts, notes


def _exceptions(facts: record.RunRecord, claim: str) -> list[str]:
    found = []
    if facts.vocabulary == "clients":
        found.append("the vocabulary, which was built from the clients' own text")
    if claim == "observed":
        found.append("other schedules than the one that was observed")
    return found


def _other_stages(facts: record.RunRecord, folder: PathLike, stated: Sequence[PathLike]) -> list[str]:
    """The stages of a stage's run, begun or not, that a headline over the folders in `stated` leaves out: as its record
    says, wherever it lies, or the list beside it (of a version whose records did not say it)."""
    inside = pathlib.Path(folder).resolve()
    named = {pathlib.Path(path).resolve() for path in stated}
    if facts.stage is None:
        own, stages = inside.name, evidence.stages_of(inside.parent) or []
    else:
        own, stages = facts.stage["name"], facts.stage["of"]
    if own not in stages or inside.parent in named:
        return []
    others = [name for name in stages if name != own and inside.with_name(name) not in named]
    return [f"{name} of the same run, over the same devices" for name in others]


def _state(run: _Stated) -> PrivacyStatement:
    facts, log, notes = run.facts, run.log, run.notes
    if facts.mechanism == "none":
        return no_guarantee(unit=facts.unit, reasons=["the run added no noise (mechanism none)"], notes=notes)
    parts = facts.mechanisms(log.num_rounds)
    deployment = None
    if facts.deployment is not None and facts.num_rounds > MOST_DEPLOYED_ROUNDS:
        notes = [
            *notes,
            f"deployment scale is left out: {facts.num_rounds} planned rounds are more than the "
            f"{MOST_DEPLOYED_ROUNDS} it is computed for",
        ]
    elif facts.deployment is not None:
        whole = _bare(facts.mechanisms(facts.num_rounds)[0])
        goal = facts.deployment.get("report_goal", DEPLOYMENT_REPORT_GOAL)
        goal = _checks.integer("deployment report_goal", goal, minimum=1)
        share = _checks.finite("deployment share", facts.deployment.get("share", 1), above=True)
        deployment = at_deployment(
            dataclasses.replace(whole, noise_multiplier=facts.noise_multiplier),
            report_goal=facts.report_goal,
            delta=facts.delta,
            deployment_report_goal=max(1, round(goal * share)),
            population=facts.deployment.get("population", DEPLOYMENT_POPULATION),
        )
        if facts.secure_aggregation is not None:
            deployment["sentence"] += f" {OF_EXACT_SUMS}"
    return statement(
        parts,
        delta=facts.delta,
        clip_norm=facts.clip["norm"],
        report_goal=facts.report_goal,
        observed=observed_facts(parts, log, delta=facts.delta),
        deployment=deployment,
        simulation=facts.simulation,
        estimator="Honaker (2015), streaming" if facts.mechanism == "tree_reduced" else None,
        exceptions=run.excepted,
        not_covered=[*facts.not_covered, *run.excepted],
        notes=notes,
        details=_details(facts, parts),
    )


def _details(facts: record.RunRecord, parts: Sequence[Mechanism]) -> list[dict[str, Any]]:
    """Of adaptive clipping, which noise multiplier is whose and what z they come to; nothing where there is one."""
    if facts.clip["kind"] != "adaptive":
        return [{} for _ in parts]
    bits = [isinstance(part, QuantileEstimation) for part in parts]
    return [
        {"noise_on": "bits" if own else "updates", "whole_noise_multiplier": facts.noise_multiplier}
        for own in bits
    ]


def _state_together(runs: Sequence[_Stated]) -> PrivacyStatement:
    """Several runs over one population: their costs add, and the headline is the sum."""
    unprotected = [run.where for run in runs if run.facts.mechanism == "none"]
    if unprotected:
        reasons = [f"{where}: the run added no noise (mechanism none)" for where in unprotected]
        return no_guarantee(unit=runs[0].facts.unit, reasons=reasons)
    deltas = sorted({run.facts.delta for run in runs})
    if len(deltas) > 1:
        raise ValueError(
            f"the runs state different deltas, {', '.join(f'{d:g}' for d in deltas)}: report them apart"
        )
    parts, details, excepted, not_covered = [], [], [], []
    notes = [f"{len(runs)} runs over the same devices, composed"]
    deployed = {}
    for run in runs:
        one = _state(run)
        _require_no_less(run.folder, one)
        own = run.facts.mechanisms(run.log.num_rounds)
        settings = {
            "part": run.where,
            "clip_norm": run.facts.clip["norm"],
            "clip_adapts": run.facts.clip["kind"] == "adaptive",
            "report_goal": run.facts.report_goal,
        }
        parts += own
        details += [settings | more for more in _details(run.facts, own)]
        notes += [f"{run.where} alone: {one.sentence}", *run.notes]
        deployed[run.where] = one.data["deployment"]
        excepted += run.excepted
        not_covered += run.facts.not_covered
    exceptions = list(dict.fromkeys(excepted))
    known = all(deployed.values()) and len({section["population"] for section in deployed.values()}) == 1
    return statement(
        parts,
        delta=deltas[0],
        deployment=together_at_deployment(deployed, delta=deltas[0]) if known else None,
        simulation=any(run.facts.simulation for run in runs),
        exceptions=exceptions,
        not_covered=list(dict.fromkeys([*not_covered, *exceptions])),
        notes=notes,
        details=details,
    )


def observed_facts(parts: Sequence[Mechanism], log: record.Participation, *, delta: float) -> dict[str, Any]:
    """Returns realised participation and the cost of the costliest device's schedule, all parts together."""
    seen = record.observe(log)
    total, first, known = 0.0, None, "gaussian"
    for part in parts:
        inner = _bare(part)
        found = sensitivity.observed(inner, log.devices, log.rounds)
        rounded = isinstance(part, (SecureAggregation, DistributedDiscreteGaussian))
        squared = found.squared * (part.inflation**2 if rounded else 1)
        if isinstance(part, DistributedDiscreteGaussian):
            # Fresh noise every round: what was found is the number of participations, times the adjacency's factor,
            # which the cost of one already holds.
            once = dataclasses.replace(part, max_participations=1)
            times = found.squared / SENSITIVITY_FACTOR[inner.adjacency] ** 2
            total, known = total + guarantees.rho(once) * times, "zcdp"
        else:
            total += guarantees.rho_from_sensitivity(squared, inner.noise_multiplier)
        first = squared if first is None else first
    return {
        "num_rounds": seen.num_rounds,
        "num_devices": seen.num_devices,
        "num_failed": log.num_failed,
        "min_separation": seen.min_separation,
        "max_participations": seen.max_participations,
        "histogram": {str(count): number for count, number in seen.histogram.items()},
        "squared_sensitivity": first or 0,
        "rho": total,
        "epsilon": conversions.epsilon_from_rho(total, delta=delta, known=known),
    }


def _bare(part: Mechanism) -> TreeAggregation | MatrixMechanism:
    """The mechanism inside secure aggregation or quantile estimation; of shares of noise the one they stand for."""
    if isinstance(part, DistributedDiscreteGaussian):
        return MatrixMechanism(
            strategy=strategies.independent(),
            noise_multiplier=part.noise_multiplier,
            num_rounds=part.num_rounds,
            min_separation=part.separation,
            max_participations=part.max_participations,
            adjacency=part.adjacency,
            unit=part.unit,
        )
    inner = part if isinstance(part, (TreeAggregation, MatrixMechanism)) else part.mechanism  # pyright: ignore
    return inner
