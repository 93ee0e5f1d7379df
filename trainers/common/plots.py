"""Pictures of a run: curves with reference lines, and matrices. Written whole, without a display."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainers.common import files

Series = tuple[Sequence[float], Sequence[float | None]]
_LARGEST = 1e15


def figure(columns: int = 1, *, width: float = 5.2, height: float = 3.6) -> tuple[Any, list[Any]]:
    """A figure that needs no display, and its axes in one row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width * columns, height), layout="constrained", dpi=120)
    FigureCanvasAgg(made)
    return made, [made.add_subplot(1, columns, i + 1) for i in range(columns)]


def curves(
    axis: Any,
    series: Mapping[str, Series],
    *,
    xlabel: str,
    ylabel: str,
    lines: Mapping[str, float] | None = None,
    title: str | None = None,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Draws labelled curves on `axis`; `lines` are horizontal references with their labels.

    What cannot be drawn (None, infinite, beyond 1e15: a run that fell apart) leaves a gap.
    """
    for label, (x, given) in series.items():
        y = np.array([np.nan if v is None else v for v in given], np.float64)
        y[~(np.abs(y) < _LARGEST)] = np.nan
        axis.plot(x, y, label=label, linewidth=1.6, marker="o" if len(x) < 12 else None, markersize=3.5)
    for i, (label, level) in enumerate((lines or {}).items()):
        color = ("0.3", "0.6", "tab:brown")[i // 3 % 3]  # no two alike among nine
        axis.axhline(level, color=color, linestyle=("--", ":", "-.")[i % 3], linewidth=1.1, label=label)
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    if not log_x and series and all(float(v).is_integer() for x, _ in series.values() for v in x):
        axis.xaxis.get_major_locator().set_params(integer=True)
    if title:
        axis.set_title(title, fontsize=10)
    if log_x:
        _log_x(axis)
    if log_y:
        axis.set_yscale("log")
    axis.grid(alpha=0.25)
    if series or lines:
        axis.legend(fontsize=8, framealpha=0.8, edgecolor="none")  # labels stay readable above curves


def _log_x(axis: Any) -> None:
    """A logarithmic axis in plain numbers, over few decades also at 2 and 5: the usual labels overlap there."""
    from matplotlib.ticker import LogLocator

    axis.set_xscale("log")
    low, high = axis.get_xlim()
    if high / low > 1e3:
        return
    axis.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("{x:g}")
    axis.tick_params(axis="x", which="both", labelsize=8)


def matrix(axis: Any, values: np.ndarray, *, xlabel: str, ylabel: str, title: str | None = None) -> None:
    """Draws a matrix as a picture with zero in the middle of the colour scale."""
    largest = float(np.abs(values).max()) or 1.0
    shown = axis.imshow(values, cmap="RdBu_r", vmin=-largest, vmax=largest, interpolation="nearest")
    axis.figure.colorbar(shown, ax=axis, shrink=0.8)
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    if title:
        axis.set_title(title, fontsize=10)


def save(made: Any, path: files.PathLike) -> None:
    """Writes the figure as PNG (by the name's ending: also PDF, SVG), whole or not at all."""
    kind = pathlib.Path(path).suffix.lstrip(".") or "png"
    with files.atomic_write(path, "wb") as file:
        made.savefig(file, format=kind)
