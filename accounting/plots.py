"""Pictures of guarantees: epsilon against delta, rho against separation, mechanisms side by side."""

import dataclasses
import math
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from accounting import comparison as comparisons
from accounting import conversions, gaussian, guarantees, planning
from accounting.mechanisms import MatrixMechanism, TreeAggregation

FORMATS = (".png", ".pdf", ".svg")
CENSUS_RHO = 2.6  # US Census 2020, for scale
INK, ACCENT, MUTED = "#1f3a5f", "#c8553d", "#8a8f98"


def check_format(path: str) -> None:
    """Refuses a picture file that could not be written, before anything is computed."""
    target = pathlib.Path(path)
    if target.suffix.lower() not in FORMATS:
        raise ValueError(f"--plot {path}: the file must end in one of {', '.join(FORMATS)}")
    if not target.parent.is_dir():
        raise ValueError(f"--plot {path}: the folder {target.parent} does not exist")


def save(figure: Figure, path: str) -> None:
    """Writes the picture, whole or not at all."""
    target = pathlib.Path(path)
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=target.suffix, delete=False) as aside:
        pass
    try:
        figure.savefig(aside.name, dpi=150, bbox_inches="tight")
        os.chmod(aside.name, 0o644)
        os.replace(aside.name, target)
    except BaseException:
        os.unlink(aside.name)
        raise


def curve(rho: float, *, known: str, delta: float) -> Figure:
    """Epsilon against delta for one rho."""
    figure = Figure(figsize=(6, 4))
    _curve(figure.add_subplot(), {f"rho = {rho:.4g}": rho}, known, delta)
    return figure


def guarantee(run: TreeAggregation | MatrixMechanism, *, delta: float) -> Figure:
    """Epsilon against delta, and rho against the rounds strictly between participations."""
    figure = Figure(figsize=(11, 4))
    left, right = figure.subplots(1, 2)
    _curve(left, {f"z = {run.noise_multiplier:g}": guarantees.rho(run)}, "gaussian", delta)
    separation_panel(right, run)
    figure.tight_layout()
    return figure


def separation_panel(axes: Any, run: TreeAggregation | MatrixMechanism, points: int = 40) -> None:
    """Draws rho against MinS, as many participations as each separation allows, and marks the run."""
    n = max(run.num_rounds, 1)
    separations = np.unique(np.append(np.geomspace(max(n // 64, 1), n, points).astype(int), run.separation))
    rhos = [
        guarantees.rho(
            dataclasses.replace(run, min_separation=int(b), rounds_between=None, max_participations=None)
        )
        for b in separations
    ]
    axes.step(separations - 1, rhos, where="post", color=INK, label="any number of participations")
    axes.plot([run.separation - 1], [guarantees.rho(run)], "o", color=ACCENT, label="this run")
    axes.axhline(CENSUS_RHO, color=MUTED, linewidth=1, linestyle=":")
    axes.annotate("US Census 2020", (separations[-1] - 1, CENSUS_RHO), ha="right", va="bottom", color=MUTED)
    if np.isfinite(rhos).all() and min(rhos) > 0:
        axes.set_yscale("log")
    axes.set_xlabel("rounds strictly between participations (MinS)")
    axes.set_ylabel("rho (zCDP)")
    axes.legend(frameon=False)


def _curve(axes: Any, rhos: Mapping[str, float], known: str, delta: float) -> None:
    deltas = np.geomspace(1e-15, 1e-3, 200)
    for (name, rho), color in zip(rhos.items(), (INK, ACCENT, MUTED)):
        if math.isfinite(rho):
            axes.plot(deltas, conversions.epsilon_curve(rho, deltas, known=known), color=color, label=name)
    if 0 < delta < 1:
        axes.axvline(delta, color=MUTED, linewidth=1, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlabel("delta")
    axes.set_ylabel("epsilon")
    axes.legend(frameon=False)


def comparison(rows: Sequence[comparisons.Compared]) -> Figure:
    """Noise at equal rho, and epsilon at equal noise, one bar a mechanism."""
    figure = Figure(figsize=(11, 0.45 * len(rows) + 1.6))
    left, right = figure.subplots(1, 2, sharey=True)
    names = [row.mechanism for row in rows]
    colors = [ACCENT if row.mechanism == comparisons.REFERENCE else INK for row in rows]
    for axes, values, title in (
        (left, [row.max_ratio for row in rows], "worst prefix noise at equal rho (Honaker tree = 1)"),
        (right, [row.epsilon for row in rows], "epsilon at the Honaker tree's worst noise"),
    ):
        bars = axes.barh(names, values, color=colors)
        axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3)
        axes.set_xscale("log")
        axes.margins(x=0.15)
        axes.xaxis.set_visible(False)  # the bars carry their values
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.tight_layout()
    return figure


def frontier(options: Sequence[planning.Option], *, target: float, delta: float) -> Figure:
    """Worst noise per client against epsilon, a curve a mechanism and report goal; points are the plan's lines."""
    figure = Figure(figsize=(7, 4.5))
    axes = figure.add_subplot()
    names = list(dict.fromkeys(option.mechanism for option in options))
    goals = sorted({option.report_goal for option in options})
    reach = np.geomspace(target / 8, target * 8, 40)
    rhos = np.array([gaussian.rho_for(eps, delta) for eps in reach])
    for name, color in zip(names, ("#1f3a5f", "#c8553d", "#3a7d44", "#b08900", "#7b4f9d")):
        for goal, line, marker in zip(goals, ("-", "--", ":", "-.") * len(goals), "osD^vP*X<>" * len(goals)):
            mine = [o for o in options if o.mechanism == name and o.report_goal == goal]
            if not mine:
                continue
            # Noise is proportional to z, and z to 1 / sqrt(rho): the whole curve follows from one point.
            per_root = mine[0].worst_noise * math.sqrt(mine[0].rho)
            axes.plot(reach, per_root / np.sqrt(rhos), line, color=color, label=f"{name}, report goal {goal}")
            axes.plot([o.epsilon for o in mine], [o.worst_noise for o in mine], marker, color=color)
    axes.axvline(target, color=MUTED, linewidth=1, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"epsilon at delta = {delta:g} (dotted: the target)")
    axes.set_ylabel("worst prefix noise per client (clip norms)")
    axes.legend(frameon=False, fontsize=8, bbox_to_anchor=(1.02, 1), loc="upper left")
    return figure


def report(data: Mapping[str, Any]) -> Figure:
    """Enforced and observed epsilon against delta, and how often devices took part."""
    figure = Figure(figsize=(11, 4))
    left, right = figure.subplots(1, 2)
    seen = data["observed"] or {}
    rhos = {}
    for name, rho in (
        ("allowed schedules (the guarantee)", data["rho"]),
        ("the costliest device", seen.get("rho")),
    ):
        if rho is not None:
            rhos[name] = float(rho)
    _curve(left, rhos, "gaussian", data["delta"] or 0.0)
    counts = {int(count): number for count, number in seen.get("histogram", {}).items()}
    right.bar(list(counts), list(counts.values()), color=INK)
    right.set_xlabel("participations of a device")
    right.set_ylabel("devices")
    figure.tight_layout()
    return figure
