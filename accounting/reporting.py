"""A run's statement from its folder alone, and what its noise would mean at deployment scale."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from accounting import _checks, guarantees, record, sensitivity
from accounting.mechanisms import MatrixMechanism, Mechanism, SecureAggregation, TreeAggregation
from accounting.statement import PrivacyStatement, no_guarantee, round_up, statement

DEPLOYMENT_REPORT_GOAL, DEPLOYMENT_POPULATION = 6500, 1_000_000


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
            f"would give ({round_up(eps)}, {delta:g})-differential privacy, {round_up(rho)}-zCDP."
        ),
    }


def max_separation(population: int, report_goal: int) -> int:
    """Returns the largest b that N devices and report goal m allow: floor(N / m) (b - 1 rounds between)."""
    population = _checks.integer("population", population, minimum=1)
    goal = _checks.integer("report_goal", report_goal, minimum=1)
    if population < goal:
        raise ValueError(f"population must be at least report_goal = {goal}, got {population}")
    return population // goal


def report(run_dir: str | os.PathLike[str], *, claim: str = "enforced") -> PrivacyStatement:
    """Returns the statement of a run from its record, with both the enforced and the observed facts.

    Args:
      claim: "enforced" states the worst case over the recorded limits, for the rounds released so far, and
        refuses (ValueError) if the log breaks them; "observed" states the worst case over the realised
        separation, count and least noise instead, and says that nothing enforced them.
    """
    _checks.choice("claim", claim, ("enforced", "observed"))
    facts = record.read_mechanism(run_dir)
    log = record.read_participation(run_dir)
    return report_of(facts, log, claim=claim, where=os.fspath(run_dir))


def report_of(
    facts: record.RunRecord, log: record.Participation, *, claim: str, where: str = "the run"
) -> PrivacyStatement:
    """`report` on what was already read."""
    if facts.mechanism == "none":
        return no_guarantee(unit=facts.unit, reasons=["the run added no noise (mechanism none)"])
    broken = record.violation(facts, log)
    if broken and claim == "enforced":
        raise ValueError(
            f"{where}: {broken}; the enforced guarantee does not hold. Ask for the observed one instead"
        )
    seen = record.observe(log)
    notes = list(facts.notes)
    if claim == "observed":
        facts = dataclasses.replace(
            facts,
            noise_multiplier=min(facts.noise_multiplier, log.least_noise or facts.noise_multiplier),
            num_rounds=max(log.num_rounds, 1),
            min_separation=seen.min_separation or max(log.num_rounds, 1),
            max_participations=max(seen.max_participations, 1),
            restarts=[r for r in facts.restarts if r < log.num_rounds],
        )
        notes.append(
            "the limits are what the participation log shows; nothing enforced them"
            + (f" (the record's own limits were broken: {broken})" if broken else "")
        )
    if log.torn:
        notes.append("the log's last line was cut short; its round had not been released and is not counted")
    parts = facts.mechanisms(log.num_rounds)
    exceptions = []
    if facts.vocabulary == "clients":
        exceptions.append("the vocabulary, which was built from the clients' own text")
    if claim == "observed":
        exceptions.append("other schedules than the one that was observed")
    deployment = None
    if facts.deployment is not None:
        whole = _bare(facts.mechanisms(facts.num_rounds)[0])
        deployment = at_deployment(
            dataclasses.replace(whole, noise_multiplier=facts.noise_multiplier),
            report_goal=facts.report_goal,
            delta=facts.delta,
            deployment_report_goal=facts.deployment.get("report_goal", DEPLOYMENT_REPORT_GOAL),
            population=facts.deployment.get("population", DEPLOYMENT_POPULATION),
        )
    return statement(
        parts,
        delta=facts.delta,
        clip_norm=facts.clip["norm"],
        report_goal=facts.report_goal,
        observed=observed_facts(parts, log, delta=facts.delta),
        deployment=deployment,
        simulation=facts.simulation,
        estimator="Honaker (2015), streaming" if facts.mechanism == "tree_reduced" else None,
        exceptions=exceptions,
        not_covered=[*facts.not_covered, *exceptions],
        notes=notes,
    )


def observed_facts(parts: Sequence[Mechanism], log: record.Participation, *, delta: float) -> dict[str, Any]:
    """Returns realised participation and the cost of the costliest device's schedule, all parts together."""
    seen = record.observe(log)
    total, first = 0.0, None
    for part in parts:
        inner = _bare(part)
        found = sensitivity.observed(inner, log.devices, log.rounds)
        squared = found.squared * (part.inflation**2 if isinstance(part, SecureAggregation) else 1)
        total += guarantees.rho_from_sensitivity(squared, inner.noise_multiplier)
        first = squared if first is None else first
    from accounting.conversions import epsilon_from_rho

    return {
        "num_rounds": seen.num_rounds,
        "num_devices": seen.num_devices,
        "num_failed": log.num_failed,
        "min_separation": seen.min_separation,
        "max_participations": seen.max_participations,
        "histogram": {str(count): number for count, number in seen.histogram.items()},
        "squared_sensitivity": first or 0,
        "rho": total,
        "epsilon": epsilon_from_rho(total, delta=delta, known="gaussian"),
    }


def _bare(part: Mechanism) -> TreeAggregation | MatrixMechanism:
    """The mechanism inside secure aggregation or quantile estimation."""
    inner = part if isinstance(part, (TreeAggregation, MatrixMechanism)) else part.mechanism  # pyright: ignore
    return inner
