"""`jaxpriv account tree|matrix|convert|calibrate|plan|compare|report`: guarantees from the command line.

jaxpriv account tree --noise-multiplier 7 --rounds 2000 --rounds-between 313 --max-participations 6 \
    --adjacency zero-out --delta 1e-10
"""

import contextlib
import dataclasses
import functools
import io
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import tyro

import accounting
from accounting import commands_config as config
from accounting import conversions
from accounting.comparison import REFERENCE
from accounting.files import read_strategy
from accounting.options import one_line, with_names
from accounting.statement import in_full, jsonable, round_up

PROGRAM = "jaxpriv account"
MADE_FOR_A_SEPARATION = ("blt", "bandmf", "banded_square_root", "banded_inverse_square_root")


class Outcome(NamedTuple):
    """What a command found: text for a person, an object for `--json`, and how to draw it."""

    text: str
    result: dict[str, Any]
    draw: Callable[[], Any]


def main(argv: list[str] | None = None) -> int:
    """Runs one command; bad input prints one line on standard error and gives status 2."""
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name not in COMMANDS:
        print(f"{PROGRAM}: unknown command {name!r}; choose one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    settings, run = COMMANDS[name]
    try:
        options = _parse(settings, argv[1:], f"{PROGRAM} {name}")
        if options.plot:
            _plots().check_format(options.plot)
        with warnings.catch_warnings(record=True) as caught:
            outcome = run(options)
            if options.plot:
                _plots().save(outcome.draw(), options.plot)
    except BrokenPipeError:
        raise  # the reader went away; the caller ends quietly
    except (ValueError, OSError, OverflowError, MemoryError) as error:
        if os.environ.get("JAXPRIV_TRACEBACK"):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, MemoryError):
            text = "these settings need more memory than there is; check the number of rounds and lower it"
        print(f"{PROGRAM} {name}: {text}", file=sys.stderr)
        return 2
    for text in dict.fromkeys(" ".join(str(warning.message).split()) for warning in caught):
        print(f"{PROGRAM} {name}: warning: {text}", file=sys.stderr)
    if options.json:
        print(outcome.text, file=sys.stderr)
        print(json.dumps(jsonable(outcome.result), allow_nan=False), flush=True)
    else:
        print(outcome.text, flush=True)
    return 0


def _plots() -> Any:
    from accounting import plots  # matplotlib is slow to load and rarely needed

    return plots


def _usage() -> str:
    rows = [
        f"  {name:<10} {(settings.__doc__ or '').splitlines()[0]}" for name, (settings, _) in COMMANDS.items()
    ]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [OPTIONS]",
            "",
            *rows,
            "",
            f"`{PROGRAM} COMMAND --help` lists its options. --json prints one object as the last line;",
            "--plot FILE draws the result.",
        ]
    )


def _parse(settings: type, argv: list[str], program: str) -> Any:
    flavour = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    if settings is config.Report:  # its folders are words, not an option
        flavour += (tyro.conf.PositionalRequiredArgs,)
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(
                settings,
                args=with_names(argv, config.NAMED.get(settings, {})),
                prog=program,
                config=flavour,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(one_line(captured.getvalue())) from None


def _mechanism(options: Any, z: float) -> accounting.TreeAggregation | accounting.MatrixMechanism:
    common: dict[str, Any] = {
        "noise_multiplier": z,
        "num_rounds": options.rounds,
        "min_separation": options.min_separation,
        "rounds_between": options.rounds_between,
        "max_participations": options.max_participations,
        "restarts": options.restarts,
        "adjacency": options.adjacency,
        "unit": options.unit,
    }
    name = getattr(options, "strategy", "tree")
    if name == "tree":
        return accounting.TreeAggregation(**common, completion=options.completion)
    if getattr(options, "completion", False):
        raise ValueError("completion belongs to trees; leave --completion out with a matrix strategy")
    # The class is checked before an optimizer is started with it.
    bare = accounting.MatrixMechanism(**common, strategy=accounting.strategies.independent())
    longest = max(bare.segments, default=1)
    strategy = read_strategy(
        name,
        num_rounds=longest,
        min_separation=bare.separation,
        max_participations=max(min(bare.participations, -(-longest // bare.separation)), 1),
        bands=options.bands,
        buffers=options.buffers,
    )
    return dataclasses.replace(bare, strategy=strategy)


def _guaranteed(
    run: accounting.TreeAggregation | accounting.MatrixMechanism, options: Any, notes: tuple[str, ...] = ()
) -> Outcome:
    if options.group_size < 1:
        raise ValueError(f"--group-size must be at least 1, got {options.group_size}")
    parts: list[Any] = [run]
    if options.count_stddev is not None:
        value = accounting.value_noise_multiplier(run.noise_multiplier, count_stddev=options.count_stddev)
        parts = [
            dataclasses.replace(run, noise_multiplier=value),
            accounting.QuantileEstimation(count_stddev=options.count_stddev, schedule=run),
        ]
        notes = (
            *notes,
            f"adaptive clipping: noise {value:.9g} x C on updates and {options.count_stddev:g} on the count of "
            f"clip bits together cost what noise multiplier {run.noise_multiplier:g} costs",
        )
    said = accounting.statement(parts, delta=options.delta, notes=notes)
    result = _result(said)
    if options.method != "exact":
        result["epsilon"] = accounting.epsilon(run, delta=options.delta, method=options.method)
        result["method"] = options.method
    if options.group_size > 1:
        group = accounting.compose(parts, delta=options.delta, group_size=options.group_size)
        result["group"] = {"size": options.group_size, "rho": group.rho, "epsilon": group.epsilon}
    text = said.markdown()
    if options.method != "exact":
        text += f"\nBy method {options.method}: epsilon {round_up(result['epsilon'])}.\n"
    if options.group_size > 1:
        text += (
            f"\nA group of {options.group_size} {run.unit}s: rho {round_up(group.rho)}, "
            f"epsilon {round_up(group.epsilon)} at delta = {in_full(options.delta)}.\n"
        )
    return Outcome(text, result, lambda: _plots().guarantee(run, delta=options.delta))


def _result(said: accounting.PrivacyStatement) -> dict[str, Any]:
    data = said.data
    first = data["mechanisms"][0] if data["mechanisms"] else {}
    return {
        "rho": data["rho"],
        "epsilon": data["epsilon"],
        "delta": data["delta"],
        "squared_sensitivity": first.get("squared_sensitivity"),
        "adjacency": data["adjacency"],
        "statement": dict(data),
    }


def tree(options: config.Tree) -> Outcome:
    """The guarantee of a tree."""
    return _guaranteed(_mechanism(options, options.noise_multiplier), options)


def matrix(options: config.Matrix) -> Outcome:
    """The guarantee of a matrix mechanism, with its prefix error."""
    run = _mechanism(options, options.noise_multiplier)
    outcome = _guaranteed(run, options)
    error = accounting.prefix_error(run)
    extra = {"max_error": error.max, "rms_error": error.rms}
    text = (
        f"{outcome.text}\nPrefix sums: worst standard deviation {error.max:.6g} z C, "
        f"root mean square {error.rms:.6g} z C.\n"
    )
    return outcome._replace(text=text, result=outcome.result | extra)


def convert(options: config.Convert) -> Outcome:
    """Epsilon of a bare rho."""
    known = options.known
    if options.bounded_range and options.pure_epsilon is None:
        raise ValueError("--bounded-range says how a pure epsilon becomes rho: give it with --pure-epsilon")
    if options.rho is not None and options.pure_epsilon is None:
        rho = options.rho
    elif options.pure_epsilon is not None and options.rho is None:
        rho = accounting.pure_to_rho(options.pure_epsilon, bounded_range=options.bounded_range)
        if known == "gaussian":
            raise ValueError("a pure epsilon is not Gaussian noise: use --known zcdp")
    else:
        raise ValueError("give exactly one of --rho and --pure-epsilon")
    if options.peers and known == "zcdp":
        raise ValueError("--peers compares accountants of Gaussian noise: use it with --known gaussian")
    eps = accounting.epsilon_from_rho(rho, delta=options.delta, known=known)
    if options.pure_epsilon is not None:
        eps = min(eps, options.pure_epsilon)
    adjacency = options.adjacency or "the one rho was stated for"
    sentence = (
        f"rho = {round_up(rho)} zCDP ({'Gaussian noise' if known == 'gaussian' else 'a bare bound'}; "
        f"adjacency: {adjacency}) gives ({round_up(eps)}, {in_full(options.delta)})-differential privacy."
    )
    result = {
        "rho": rho,
        "epsilon": eps,
        "delta": options.delta,
        "squared_sensitivity": None,
        "adjacency": options.adjacency,
        "statement": {"sentence": sentence, "known": known},
    }
    if known == "gaussian":
        result["peers"] = {"cks": accounting.epsilon_from_rho(rho, delta=options.delta, known="zcdp")}
        if options.peers:
            for method in ("pld", "rdp"):
                result["peers"][method] = conversions.epsilon_by_peer(rho, delta=options.delta, method=method)
        lines = [f"  by {name}: {round_up(value)}" for name, value in result["peers"].items()]
        sentence = "\n".join([sentence, *lines])
    return Outcome(sentence, result, lambda: _plots().curve(rho, known=known, delta=options.delta))


def calibrate(options: config.Calibrate) -> Outcome:
    """One knob for a target."""
    if options.knob != "noise_multiplier" and options.noise_multiplier is None:
        raise ValueError(f"--knob {options.knob} needs --noise-multiplier")
    if options.knob == "num_rounds" and options.strategy in ("blt", "bandmf", "square_root"):
        raise ValueError(
            f"strategy {options.strategy} is made for a fixed number of rounds: calibrate noise_multiplier, "
            "or use --strategy tree, banded_square_root or independent"
        )
    if options.method != "exact":
        raise ValueError(
            f"calibrate solves for the exact epsilon, not by method {options.method}: leave --method out"
        )
    if options.knob == "num_rounds":  # the mechanism's own number is ignored, but must hold the restarts
        separation = options.min_separation or (options.rounds_between or 0) + 1
        options = dataclasses.replace(
            options,
            rounds=max(options.restarts, default=0) + 1,
            bands=separation if options.bands is None else options.bands,
        )
    elif options.rounds is None or options.rounds < 1:
        raise ValueError(f"--knob {options.knob} needs --rounds of at least 1, got {options.rounds}")
    z = 1.0 if options.noise_multiplier is None else options.noise_multiplier
    at_separation = None
    if options.knob == "min_separation":
        start = options.min_separation or 1
        options = dataclasses.replace(options, min_separation=start, rounds_between=None)
        if options.strategy in MADE_FOR_A_SEPARATION:
            at_separation = _made_at_each_separation(options, z)
    run = accounting.calibrate(
        _mechanism(options, z) if at_separation is None else at_separation(options.rounds or 1),
        knob=options.knob,
        delta=options.delta,
        epsilon=options.epsilon,
        rho=options.rho,
        at_separation=at_separation,
    )
    value = run.separation if options.knob == "min_separation" else getattr(run, options.knob)
    goal = f"epsilon {options.epsilon:g}" if options.epsilon is not None else f"rho {options.rho:g}"
    note = f"calibrated: {options.knob} = {value!r} meets {goal} at delta = {options.delta:g}"
    anew = (
        () if at_separation is None else ("the strategy was made anew for every separation that was tried",)
    )
    outcome = _guaranteed(run, options, (note, *anew))
    return outcome._replace(
        text=f"{options.knob} = {value!r}\n\n{outcome.text}",
        result=outcome.result | {"knob": options.knob, "value": value},
    )


def _made_at_each_separation(options: config.Calibrate, z: float) -> Callable[[int], Any]:
    """The mechanism at a separation with the strategy made for that; says so where it takes seconds."""
    if options.strategy in ("blt", "bandmf"):
        tries = (options.rounds or 1).bit_length() + 1
        print(f"optimizing the strategy at some {tries} separations, a second or so each", file=sys.stderr)

    @functools.cache
    def at(separation: int) -> Any:
        bands = None if options.bands is None else min(options.bands, separation)
        return _mechanism(dataclasses.replace(options, min_separation=separation, bands=bands), z)

    return at


def plan(options: config.Plan) -> Outcome:
    """Which settings reach a target."""
    found = accounting.plan(
        population=options.population,
        report_goals=options.report_goal,
        num_rounds=options.rounds,
        epsilon=options.epsilon,
        delta=options.delta,
        adjacency=options.adjacency,
        noise_multipliers=options.noise_multiplier,
        mechanisms=options.mechanism,
    )
    rows = [
        (
            option.mechanism,
            f"{option.report_goal}",
            f"{option.noise_multiplier:.4g}",
            f"{option.noise_per_client:.3g}",
            f"{option.min_separation - 1}",
            f"{option.max_participations}",
            round_up(option.rho),
            round_up(option.epsilon),
            f"{option.worst_noise:.3g}",
            "yes" if option.meets else "no",
        )
        for option in found
    ]
    header = (
        "mechanism",
        "report goal",
        "z",
        "z / m",
        "MinS",
        "MaxP",
        "rho",
        "epsilon",
        "worst noise / client",
        "reached",
    )
    best = found[0]
    sentence = (
        f"{options.population} devices, {options.rounds} rounds, target epsilon {options.epsilon:g} at delta "
        f"{options.delta:g}: least noise with {best.mechanism}, report goal {best.report_goal}, noise multiplier "
        f"{best.noise_multiplier:.4g}, {best.min_separation - 1} rounds strictly between participations."
    )
    result = {
        "rho": best.rho,
        "epsilon": best.epsilon,
        "delta": options.delta,
        "squared_sensitivity": best.squared_sensitivity,
        "adjacency": options.adjacency,
        "statement": {"sentence": sentence},
        "options": [option._asdict() for option in found],
    }
    text = f"{sentence}\n\n{_table(header, rows)}"
    return Outcome(
        text, result, lambda: _plots().frontier(found, target=options.epsilon, delta=options.delta)
    )


def compare(options: config.Compare) -> Outcome:
    """All mechanisms at one (n, b, k)."""
    # A tree of these settings checks the class and turns MinS into b.
    reference = accounting.TreeAggregation(
        noise_multiplier=options.noise_multiplier,
        num_rounds=options.rounds,
        min_separation=options.min_separation,
        rounds_between=options.rounds_between,
        max_participations=options.max_participations,
        adjacency=options.adjacency,
    )
    extra = {
        os.path.basename(path): read_strategy(
            path,
            num_rounds=max(options.rounds, 1),
            min_separation=reference.separation,
            max_participations=max(reference.participations, 1),
        )
        for path in options.strategy
    }
    rows = accounting.compare(
        num_rounds=options.rounds,
        min_separation=reference.separation,
        max_participations=options.max_participations,
        noise_multiplier=options.noise_multiplier,
        delta=options.delta,
        adjacency=options.adjacency,
        extra=extra,
        optimized=not options.closed_forms_only,
    )
    header = (
        "mechanism",
        "sensitivity^2",
        "max error",
        "rms error",
        "noise (max)",
        "noise (rms)",
        "rho for equal noise",
        "epsilon",
    )
    table = [
        (
            row.mechanism + ("" if row.exact else " (bound)"),
            f"{row.squared_sensitivity:.6g}",
            f"{row.max_error:.4f}",
            f"{row.rms_error:.4f}",
            f"{row.max_ratio:.3f}",
            f"{row.rms_ratio:.3f}",
            round_up(row.rho),
            round_up(row.epsilon),
        )
        for row in rows
    ]
    best = rows[-1]
    sentence = (
        f"At {options.rounds} rounds, b = {reference.separation}, k = {reference.participations} and equal rho, "
        f"{best.mechanism} has {best.max_ratio:.3f} times the worst prefix noise of the streaming Honaker tree; for "
        f"the tree's noise at z = {options.noise_multiplier:g} it costs rho {round_up(best.rho)}, epsilon "
        f"{round_up(best.epsilon)} at delta = {in_full(options.delta)}."
    )
    honaker = next(row for row in rows if row.mechanism == REFERENCE)
    result = {
        "rho": honaker.rho,
        "epsilon": honaker.epsilon,
        "delta": options.delta,
        "squared_sensitivity": honaker.squared_sensitivity,
        "adjacency": options.adjacency,
        "statement": {"sentence": sentence},
        "mechanisms": [row._asdict() for row in rows],
    }
    note = (
        "noise: relative to the streaming Honaker tree at equal rho; rho and epsilon: for its worst prefix noise\n"
        f"at z = {options.noise_multiplier:g}, delta = {options.delta:g}. Square roots and BLT may overlap columns."
    )
    return Outcome(
        f"{sentence}\n\n{_table(header, table)}\n\n{note}", result, lambda: _plots().comparison(rows)
    )


def report(options: config.Report) -> Outcome:
    """The statement of finished or unfinished runs, from their folders."""
    if not options.run_dir:
        raise ValueError("give the folder of a run, or a file with its statement beside it")
    found = accounting.report(
        options.run_dir,
        claim="observed" if options.observed else "enforced",
        noise_multiplier=options.noise_multiplier,
        min_separation=options.min_separation,
        max_participations=options.max_participations,
        deployment_report_goal=options.deployment_report_goal,
        population=options.population,
    )
    result = _result(found) | {"run_dir": list(options.run_dir)}
    if options.plot and any(m["kind"] == "PureDP" for m in found.data["mechanisms"]):
        raise ValueError("--plot draws Gaussian mechanisms and participation; these releases have neither")
    own = [m for m in found.data["mechanisms"] if m["kind"] != "QuantileEstimation"]
    if len(own) > 1:  # each run, or stage of one, has its own, in statement.mechanisms
        result["squared_sensitivity"] = None
    return Outcome(found.markdown(), result, lambda: _plots().report(found.data))


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in [header, *rows]
    ]
    return "\n".join(lines)


COMMANDS: dict[str, tuple[type, Callable[[Any], Outcome]]] = {
    "tree": (config.Tree, tree),
    "matrix": (config.Matrix, matrix),
    "convert": (config.Convert, convert),
    "calibrate": (config.Calibrate, calibrate),
    "plan": (config.Plan, plan),
    "compare": (config.Compare, compare),
    "report": (config.Report, report),
}
