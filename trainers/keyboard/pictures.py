"""The pictures of a run, drawn again from its metrics: accuracy, perplexity, clip norm, privacy spent."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from accounting import record
from trainers.common import metrics, plots

MOST_CURVES = 10  # more of them on one picture cannot be told apart
CENSUS_RHO = 2.6  # US Census 2020 redistricting data, persons and units together: a mark for scale


def draw(
    runs: Mapping[str, pathlib.Path], out: pathlib.Path, *, ngram: Mapping[str, Any] | None, delta: float
) -> None:
    """Writes `learning.png`, `clipping.png`, `privacy.png` and `smart_compose.png` into `out`.

    Args:
      runs: label -> run folder; the first is the run itself.
      ngram: scores of the n-gram baseline (ngram.json), drawn as lines.
    """
    out.mkdir(exist_ok=True)
    lines = {label: metrics.read(folder / "metrics.jsonl") for label, folder in runs.items()}
    scores = {label: [r for r in rows if "evaluation" in r] for label, rows in lines.items()}

    made, (left, right) = plots.figure(2)
    for axis, name, title in ((left, "top1_words", "top-1 words, %"), (right, "perplexity", "perplexity")):
        plots.curves(
            axis,
            {
                k: ([r["round"] + 1 for r in v], [r["evaluation"][name] for r in v])
                for k, v in scores.items()
                if v
            },
            xlabel="round",
            ylabel=title,
            lines=_ngram_line(ngram, name),
            title="held-out clients (not covered by the guarantee)",
            log_y=name == "perplexity",
        )
    plots.save(made, out / "learning.png")

    own = [r for r in next(iter(lines.values())) if "clip_norm" in r]
    made, (left, right) = plots.figure(2)
    x = [r["round"] + 1 for r in own]
    adapts = any(r["fraction"] is not None for r in own)
    norms = {"clip norm in force": (x, [r["clip_norm"] for r in own])}
    if adapts:
        norms["quantile estimate"] = (x, [r["estimate"] for r in own])
    plots.curves(
        left,
        norms,
        xlabel="round",
        ylabel="L2 norm of an update",
    )
    series = {"L2 norm of the noised mean": (x, [r["update_norm"] for r in own])}
    if adapts:
        series["noised fraction within the estimate"] = (x, [r["fraction"] for r in own])
    plots.curves(right, series, xlabel="round", ylabel="released by round (norm, fraction)")
    plots.save(made, out / "clipping.png")

    _smart_compose(scores, out / "smart_compose.png")
    spent = [r for r in next(iter(scores.values())) if r["rho"] is not None]
    if spent:
        made, (left, right) = plots.figure(2)
        x = [r["round"] + 1 for r in spent]
        plots.curves(
            left,
            {"this run": (x, [r["rho"] for r in spent])},
            xlabel="round",
            ylabel="rho (zCDP)",
            lines={"US Census 2020: rho = 2.6": CENSUS_RHO},
            log_y=True,
        )
        plots.curves(
            right,
            {"this run": (x, [r["epsilon"] for r in spent])},
            xlabel="round",
            ylabel=f"epsilon at delta = {delta:g}",
        )
        plots.save(made, out / "privacy.png")


def _ngram_line(ngram: Mapping[str, Any] | None, name: str) -> dict[str, float]:
    """The n-gram's score on the examples that the curves are scored on; runs of earlier versions lack it."""
    if ngram is None:
        return {}
    same = ngram.get("during_training")
    return {"5-gram, test clients": ngram[name]} if same is None else {"5-gram, same clients": same[name]}


def _smart_compose(scores: Mapping[str, list[dict[str, Any]]], path: pathlib.Path) -> None:
    """Multi-word completions by round, how often and how well, beside rho (Xu et al. 2023, section 3)."""
    runs = {label: [r for r in rows if "smart_compose" in r] for label, rows in scores.items()}
    runs = {label: rows for label, rows in runs.items() if rows}
    if not runs:  # a run of an earlier version
        return
    threshold = next(iter(runs.values()))[0]["smart_compose"]["threshold"]
    x = {label: [r["round"] + 1 for r in rows] for label, rows in runs.items()}
    made, (left, middle, right) = plots.figure(3, width=4.4)
    for axis, name, title in (
        (left, "trigger_rate", "completions shown, % of positions"),
        (middle, "accuracy", "word for word right, % of those shown"),
    ):
        plots.curves(
            axis,
            {label: (x[label], [r["smart_compose"][name] for r in rows]) for label, rows in runs.items()},
            xlabel="round",
            ylabel=title,
            title=f"confidence {threshold:g} (not covered by the guarantee)",
        )
    spent = {
        label: (x[label], [r["rho"] for r in rows])
        for label, rows in runs.items()
        if rows[0]["rho"] is not None
    }
    plots.curves(right, spent, xlabel="round", ylabel="rho (zCDP)", title="privacy spent")
    plots.save(made, path)


def draw_participation(run: pathlib.Path, out: pathlib.Path) -> None:
    """Writes `participation.png`: how often the devices took part, and how many rounds lay between.

    Args:
      run: run folder, whose log and stated limits are drawn.
    """
    stated, log = record.read_mechanism(run), record.read_participation(run)
    order = np.lexsort((log.rounds, log.devices))
    gaps = np.diff(log.rounds[order])[np.diff(log.devices[order]) == 0]
    counts = np.bincount(np.bincount(log.devices)) if len(log.devices) else np.zeros(1, int)
    counts[0] = stated.population - counts[1:].sum() if stated.population else 0
    made, (left, right) = plots.figure(2)
    left.bar(range(len(counts)), counts, color="C0")
    left.axvline(
        stated.max_participations, color="0.35", linestyle="--", label=f"limit {stated.max_participations}"
    )
    left.set(xlabel="rounds that a device took part in", ylabel="devices")
    right.hist(gaps, bins=min(40, max(len(np.unique(gaps)), 1)), color="C0")
    right.axvline(
        stated.min_separation, color="0.35", linestyle="--", label=f"enforced {stated.min_separation}"
    )
    title = "nobody took part twice" if not len(gaps) else f"least {gaps.min()}"
    right.set(xlabel="rounds from one participation to the next", ylabel="times", title=title)
    for axis in (left, right):
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(fontsize=8, frameon=False)
    plots.save(made, out / "participation.png")


def compare(
    runs: Mapping[str, Mapping[str, Any]], path: pathlib.Path, *, ngram: Mapping[str, Any] | None
) -> None:
    """Draws several runs on one picture: accuracy by round, and the last one over the noise per client and over rho.

    At equal z / m mechanisms cost differently; at equal rho their lines show what each is worth. Where all runs with
    noise have one mechanism and one z / m, perplexity by round is drawn in place of both.

    Args:
      runs: label -> `{"rows": evaluations, "config": settings}`. More than ten are not drawn by round.
      ngram: scores of the n-gram baseline (ngram.json); its top-1 words are drawn as a line.
    """
    lines = _ngram_line(ngram, "top1_words")
    by_round = len(runs) <= MOST_CURVES
    # Rounded: 0.027 / 25 and 0.108 / 100 are one noise per client.
    kinds = {(run["config"]["mechanism"], f"{noise_per_client(run['config']):.6g}") for run in runs.values()}
    if by_round and len({kind for kind in kinds if kind[0] != "none"}) < 2:
        made, (left, right) = plots.figure(2)
        plots.curves(
            left, _by_round(runs, "top1_words"), xlabel="round", ylabel="top-1 words, %", lines=lines
        )
        plots.curves(right, _by_round(runs, "perplexity"), xlabel="round", ylabel="perplexity", log_y=True)
        plots.save(made, path)
        return
    made, axes = plots.figure(3 if by_round else 2)
    if by_round:
        by = _by_round(runs, "top1_words")
        plots.curves(axes[0], by, xlabel="round", ylabel="top-1 words, %", lines=lines)
    ends = [(run["config"], run["rows"][-1]) for run in runs.values()]
    several = len({config["mechanism"] for config, _ in ends} - {"none"}) > 1
    lengths = {config["rounds"] for config, _ in ends}
    without = {
        f"no noise, {config['rounds']} rounds": row["evaluation"]["top1_words"]
        for config, row in ends
        if config["mechanism"] == "none"
    }
    for axis, xlabel, x_of in (
        (axes[-2], "noise per client z / m", lambda config, row: noise_per_client(config)),
        (axes[-1], "rho (zCDP) of the run", lambda config, row: row["rho"]),
    ):
        points: dict[str, list[tuple[float, float]]] = {}
        for config, row in ends:
            if config["mechanism"] == "none":
                continue
            names = [config["mechanism"]] if several else []
            names += [f"{config['rounds']} rounds"] if not several or len(lengths) > 1 else []
            points.setdefault(", ".join(names), []).append(
                (x_of(config, row), row["evaluation"]["top1_words"])
            )
        plots.curves(
            axis,
            {label: tuple(zip(*sorted(pairs), strict=True)) for label, pairs in sorted(points.items())},  # type: ignore[misc]
            xlabel=xlabel,
            ylabel="top-1 words after the last round, %",
            lines=lines | without,
            log_x=True,
        )
    plots.save(made, path)


def _by_round(runs: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, plots.Series]:
    return {
        label: ([r["round"] + 1 for r in run["rows"]], [r["evaluation"][name] for r in run["rows"]])
        for label, run in runs.items()
    }


def noise_per_client(config: Mapping[str, Any]) -> float:
    """z / m of a run's settings; 0 without a mechanism."""
    return 0.0 if config["mechanism"] == "none" else config["noise_multiplier"] / config["report_goal"]
