"""Latency and bandwidth against size, a line for each contender, limits dashed; by matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mycoll._units import show_size
from mycoll.bench.result import LEGEND, Row

# Colours that colour-blind people can tell apart (Okabe and Ito); the subject comes first.
_COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
_STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 130,
    "font.size": 9,
    "grid.color": "#E5E5E5",
    "legend.frameon": False,
}
_DASHES = {"fake": "dotted", "copy": "dashed"}


def undrawable(path: str) -> str:
    """Why matplotlib cannot draw this file; '' where it can."""
    ending = Path(path).suffix.removeprefix(".").lower()
    try:
        importlib.import_module("matplotlib")
        known = importlib.import_module("matplotlib.backend_bases").FigureCanvasBase.filetypes
    except ImportError as error:
        return f"it needs matplotlib (pip install matplotlib): {error}"
    return "" if not ending or ending in known else f"'{path}' must end in {', '.join(known)}"


def draw(path: str, header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Writes the picture; returns a line that says what happened."""
    if reason := undrawable(path):
        return f"# no plot: {reason}"
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    panels = _panels(rows)
    if not panels:
        return "# no plot: it needs an operation measured at two sizes at least"
    with pyplot.rc_context(_STYLE):
        size = (12.0, 4.2 * len(panels) + 0.6)
        figure, axes = pyplot.subplots(len(panels), 2, figsize=size, squeeze=False)
        for (title, chosen), (latency, bandwidth) in zip(panels.items(), axes, strict=True):
            _draw_lines(latency, chosen, "time_us")
            latency.set(title=f"{title}: time", ylabel="microseconds", yscale="log")
            rates = [row for row in chosen if row.contender_kind != "floor"]
            _draw_lines(bandwidth, rates, "busbw")
            bandwidth.set(title=f"{title}: bus bandwidth", ylabel="GB/s", ylim=(0, None))
            latency.legend()
        machine, versions = header["machine"], header["versions"]
        about = f"{machine['cpu']}, {machine['usable_cores']} cores   torch {versions['torch']}"
        about += f", mycoll {versions['mycoll']}   {header['date']}"
        figure.suptitle(about, color="#555555", x=0.01, ha="left")
        figure.tight_layout()
        figure.savefig(path)
        pyplot.close(figure)
    return f"# plot: {path}"


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by the title above a pair of axes, if there is a line to draw."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        if row.op != "barrier":
            kind = row.type if row.redop == "none" else f"{row.type} {row.redop}"
            panels.setdefault(f"{row.op}, {kind}, {row.ranks} ranks", []).append(row)
    return {title: each for title, each in panels.items() if len({row.size for row in each}) > 1}


def _draw_lines(axes: Any, rows: Sequence[Row], figure: str) -> None:
    colours = iter(_COLOURS * len(rows))
    for name, kind in dict.fromkeys((row.contender, row.contender_kind) for row in rows):
        line = [row for row in rows if row.contender == name]
        sizes, values = [row.size for row in line], [getattr(row, figure) for row in line]
        if kind in ("floor", "limit"):
            label = "the same, non-temporal" if name == "copy-nt" else LEGEND[kind]
            look = {"color": "#777777", "linestyle": _DASHES.get(name, "dashdot"), "zorder": 1}
            axes.plot(sizes, values, label=label, **look)
            continue
        label = f"{name} ({LEGEND[kind]})" if kind in LEGEND else name
        colour = next(colours)
        axes.plot(sizes, values, label=label, color=colour, marker="o", linewidth=2)
        if figure == "time_us" and kind == "backend":
            low, high = [row.min_us for row in line], [row.max_us for row in line]
            axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda size, _: show_size(size))
    axes.set_xlabel("size")
