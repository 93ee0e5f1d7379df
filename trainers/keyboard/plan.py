"""From settings to what will run and what it will be accounted as; everything that cannot be served is refused here."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import accounting
from accounting import record, strategies
from jaxpriv import noise, participation
from trainers.common import strategies as optimized
from trainers.common.errors import InputError
from trainers.keyboard import checks, secure_sum
from trainers.keyboard.config import Config
from trainers.keyboard.round import AdaptiveClip, RoundConfig

HOURS = (
    "each device's hour of availability was taken from its own examples: the guarantee holds for who was there when, "
    "and does not cover what that tells of their hours"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What a run does, decided before it reads a client's text twice.

    min_separation, max_participations: enforced b and k.
    mechanism: None adds no noise.
    round: the settings of every round.
    record: the same for the accountant.
    selected: clients selected per round, the report goal and over-selection together.
    """

    min_separation: int
    max_participations: int
    mechanism: noise.NoiseMechanism | None
    round: RoundConfig
    record: record.RunRecord
    selected: int


def make(
    config: Config,
    *,
    population: int,
    vocabulary_origin: str,
    dimension: int | None = None,
    notes: Sequence[str] = (),
    deployment_share: float = 1.0,
    stage: Mapping[str, Any] | None = None,
) -> Plan:
    """Checks `config` against the population and derives limits, noise and record.

    Args:
      dimension: parameters of the model; needed for secure aggregation.
      notes: further lines for the statement.
      deployment_share: of the deployment's report goal, what this run stands for there.
      stage: as in `RunRecord`.

    Raises:
      InputError: a setting that cannot be served, with its value and the remedy.
    """
    checks.check(config)
    selected = math.ceil(config.report_goal * (1 + config.over_selection))
    with _options_named():
        b, k = _participation(config, population, selected)
    private = config.mechanism != "none"
    sigma_b, z_updates, adaptive = None, config.noise_multiplier if private else 0.0, None
    if config.clip == "adaptive":
        sigma_b = config.clipped_count_stddev
        if sigma_b is None:
            sigma_b = accounting.default_count_stddev(config.report_goal)
        if private:
            with _options_named():
                z_updates = accounting.value_noise_multiplier(config.noise_multiplier, count_stddev=sigma_b)
        adaptive = AdaptiveClip(
            target=config.clip_quantile, learning_rate=config.clip_learning_rate, count_stddev=sigma_b
        )
    secured = _secure(config, dimension, z_updates if private else math.inf)
    with _options_named():
        strategy = _strategy(config, b, k)
    origin = "public" if vocabulary_origin == "public" else "clients"
    notes = list(notes)
    if vocabulary_origin == "unstated":
        notes.append("the vocabulary's origin is not stated; it is taken as clients' text")
    if private and config.insecure_noise_seed is None:
        notes.append("the noise is pseudorandom, from a key of 64 bits: the guarantee is computational")
    if secured is not None:
        notes.append(
            "the simulation computes the modular sum of the clients' integers itself; in a deployment the masked-sum "
            "protocol keeps each client's message from the server"
        )
    ran = record.RunRecord(
        mechanism=config.mechanism,
        noise_multiplier=config.noise_multiplier if private else 0.0,
        num_rounds=config.rounds,
        min_separation=b,
        max_participations=k,
        adjacency=config.adjacency,
        delta=config.delta,
        report_goal=config.report_goal,
        clip={
            "kind": config.clip,
            "norm": config.clip_norm,
            "count_stddev": sigma_b,
            "quantile": config.clip_quantile if adaptive else None,
            "learning_rate": config.clip_learning_rate if adaptive else None,
        },
        unit="device",
        population=population,
        restarts=config.restarts,
        completion=config.completion,
        strategy=_coefficients(strategy),
        secure_aggregation=_secure_facts(config, secured),
        simulation=config.insecure_noise_seed is not None,
        vocabulary=origin,
        not_covered=_not_covered(config),
        notes=notes,
        deployment={"report_goal": config.deployment_report_goal, "population": config.deployment_population}
        | ({} if deployment_share == 1 else {"share": deployment_share}),
        stage=stage,
    )
    return Plan(
        min_separation=b,
        max_participations=k,
        mechanism=_mechanism(config, strategy),
        round=RoundConfig(
            report_goal=config.report_goal,
            client_learning_rate=config.client_learning_rate,
            local_epochs=config.local_epochs,
            clip_norm=config.clip_norm,
            noise_multiplier=z_updates,
            adaptive=adaptive,
            secure=secured,
        ),
        record=ran,
        selected=selected,
    )


def _secure(config: Config, dimension: int | None, noise_multiplier: float) -> secure_sum.SecureSum | None:
    """The encoding, or a refusal: what cannot be accounted, or bits that do not fit."""
    if config.secure_aggregation == "none":
        return None
    distributed = config.secure_aggregation == "distributed"
    if distributed and (config.mechanism != "independent" or config.clip != "fixed"):
        raise InputError(
            "--secure-aggregation distributed adds fresh noise every round on the clients: it takes --mechanism "
            f"independent and --clip fixed, got {config.mechanism} and {config.clip}"
        )
    if distributed and config.adjacency == "add-remove":
        raise InputError(
            "--secure-aggregation distributed: a device that is absent adds no share of the noise, which --adjacency "
            "add-remove cannot count; use zero-out or replace-one"
        )
    if dimension is None:
        raise ValueError("secure aggregation needs the model's dimension")
    try:
        chosen = secure_sum.choose(
            dimension=dimension,
            bits=config.secagg_bits,
            report_goal=config.report_goal,
            noise_multiplier=noise_multiplier,
            distributed=distributed,
            seed=config.seed,
        )
    except ValueError as error:
        raise InputError(f"--secagg-bits {config.secagg_bits}: {error}") from None
    # A share below one integer is far from Gaussian: the account would be dominated by its correction.
    if distributed and chosen.encoding.share_stddev < 1:
        raise InputError(
            f"--secagg-bits {config.secagg_bits} leave a client's share of the noise a standard deviation of "
            f"{chosen.encoding.share_stddev:.3g} integers, below 1; take more bits"
        )
    return chosen


def _secure_facts(config: Config, secured: secure_sum.SecureSum | None) -> dict[str, Any] | None:
    """What the accountant, and the reader, are told."""
    if secured is None:
        return None
    encoding = secured.encoding
    facts: dict[str, Any] = {
        "scale": encoding.scale / config.clip_norm,
        "dimension": encoding.dimension,
        "beta": encoding.beta,
        "scale_follows_clip_norm": True,
        "bits": encoding.bits,
        "largest": encoding.largest,
        "clamp_probability_a_round": secure_sum.CLAMP_PROBABILITY,
        "noise": "distributed" if secured.distributed else "server",
    }
    if secured.distributed:
        # A round is released with exactly the report goal of messages, or not at all.
        facts |= {"min_survivors": config.report_goal, "max_clients": config.report_goal}
        facts |= {"share_stddev": encoding.share_stddev}
    return facts


def _not_covered(config: Config) -> tuple[str, ...]:
    lines = [
        "the n-gram baseline and every accuracy and perplexity: they are computed from clients' text",
        "operator.jsonl and timing.jsonl: sums over clients without noise, and times that depend on them",
    ]
    if config.compare and config.mechanism != "none":
        lines.append(
            "the comparison model in no_noise/: it was trained on the same clients without noise, not for release"
        )
    return tuple(lines)


def _participation(config: Config, population: int, selected: int) -> tuple[int, int]:
    """Enforced (b, k), or a refusal with the numbers."""
    n, rounds = population, config.rounds
    if n < selected:
        raise InputError(
            f"{n} clients cannot fill a round of {selected}; lower --report-goal or --over-selection"
        )
    b = config.min_separation
    if b is None:
        b = min(rounds, n // selected) - config.timer_jitter  # the longest wait is served too
        if b < 1:
            raise InputError(
                f"--timer-jitter {config.timer_jitter} leaves no separation: {n} clients in rounds of {selected} can "
                f"wait {n // selected} rounds; lower it, or give --min-separation"
            )
    most = participation.most_participations(rounds, b)
    k = most if config.max_participations is None else min(most, config.max_participations)
    # Who is cut off has started its timer, but has not taken part.
    for goal, count in ((selected, most), (config.report_goal, k)):
        participation.check_capacity(
            n, report_goal=goal, num_rounds=rounds, min_separation=b, max_participations=count
        )
    return b, k


def _strategy(config: Config, b: int, k: int) -> strategies.BLT | strategies.Toeplitz | None:
    """The matrix mechanism's strategy, optimized for the longest segment; coefficients as applied (float32 values)."""
    if config.mechanism not in ("blt", "banded"):
        return None
    segment = int(max(np.diff([0, *config.restarts, config.rounds])))
    separation, count = min(b, segment), min(k, participation.most_participations(segment, b))
    if config.mechanism == "blt":
        return optimized.blt(
            num_rounds=segment, min_separation=separation, max_participations=count, buffers=config.buffers
        )
    return optimized.banded(
        num_rounds=segment,
        min_separation=separation,
        max_participations=count,
        bands=min(config.bands, separation),
    )


def _coefficients(strategy: strategies.BLT | strategies.Toeplitz | None) -> dict[str, Any] | None:
    if isinstance(strategy, strategies.BLT):
        return {"theta": list(strategy.theta), "omega": list(strategy.omega)}
    return None if strategy is None else {"coefficients": list(strategy.coefficients)}


def _mechanism(
    config: Config, strategy: strategies.BLT | strategies.Toeplitz | None
) -> noise.NoiseMechanism | None:
    match config.mechanism:
        case "none":
            return None
        case "independent":
            return noise.independent()
        case "tree":
            return noise.tree(config.restarts, config.completion)
        case "tree_reduced":
            return noise.tree_reduced(config.rounds, config.restarts, config.completion)
        case "blt":
            return noise.blt(strategy, config.restarts)
        case "banded":
            return noise.banded(strategy, config.restarts)


@contextlib.contextmanager
def _options_named() -> Iterator[None]:
    """Turns a refusal of the library into one that names the command's options."""
    names = {field.name: checks.option(field.name) for field in dataclasses.fields(Config)}
    names["count_stddev"] = checks.option("clipped_count_stddev")
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        said = re.sub(r"[a-z]+(?:_[a-z]+)+", lambda found: names.get(found[0], found[0]), str(error))
        raise InputError(said) from None
