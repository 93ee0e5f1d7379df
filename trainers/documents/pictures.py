"""The pictures of an evaluation: all methods against epsilon (the paper's Figure 4), against k, against m."""

import pathlib
from typing import Any

from trainers.common import plots
from trainers.documents.evaluate import CEILING


def draw(folder: pathlib.Path, result: dict[str, Any]) -> list[str]:
    """Writes `macro_f1.png` and, where measured, `sentences.png` and `candidates.png`; returns their names."""
    means = result["macro_f1"]
    lines = {"non-private": means["nonprivate"], "random guess": means["random"]}
    if CEILING in means:
        lines["deepest candidate (no privacy)"] = means[CEILING]["inf"]
    series = {
        name: ([float(e) for e in row], list(row.values()))
        for name, row in means.items()
        if isinstance(row, dict) and name != CEILING
    }
    figure, (axis,) = plots.figure(width=6.4, height=4.4)
    plots.curves(axis, series, lines=lines, xlabel="epsilon a replaced sentence", ylabel="macro-F1, %")
    plots.save(figure, folder / "macro_f1.png")
    names = ["macro_f1.png"]
    for key, file, xlabel in (
        ("bins", "sentences.png", "sentences a document (epsilon 10)"),
        ("num_candidates", "candidates.png", "candidates (epsilon 10)"),
    ):
        if not result[key]:
            continue
        figure, (axis,) = plots.figure(width=6.4, height=4.4)
        if key == "bins":
            rows = {**result[key], "non-private": result["bins_nonprivate"]}
            ticks = list(result["bins_nonprivate"])
            points = {
                n: ([ticks.index(b) for b in row], [v["mean"] for v in row.values()])
                for n, row in rows.items()
            }
            plots.curves(axis, points, xlabel=xlabel, ylabel="macro-F1, %")
            axis.set_xticks(range(len(ticks)), ticks)
        else:
            points = {n: ([int(m) for m in row], list(row.values())) for n, row in result[key].items()}
            plots.curves(axis, points, xlabel=xlabel, ylabel="macro-F1, %", log_x=True)
        plots.save(figure, folder / file)
        names.append(file)
    return names
