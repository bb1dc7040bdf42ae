"""Latency and bandwidth against size, a line for each contender, limits dashed; by matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mycoll._units import show_size
from mycoll.bench.result import LEGEND, Row

_SHOWN_WIDTH, _ROW_HEIGHT, _DPI = 12.0, 4.2, 130
# Colours that colour-blind people can tell apart (Okabe and Ito); the subject comes first.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHED = "#777777"
_DASHES = {"fake": (1, 2), "copy": (6, 2), "copy-nt": (3, 2)}


def undrawable(path: str) -> str:
    """Why matplotlib cannot draw this file; '' where it can."""
    ending = Path(path).suffix.removeprefix(".").lower()
    try:
        importlib.import_module("matplotlib")
        known = importlib.import_module("matplotlib.backend_bases").FigureCanvasBase.filetypes
    except ImportError as error:
        return f"it needs matplotlib (pip install matplotlib): {error}"
    return "" if not ending or ending in known else f"'{path}' must end in {', '.join(known)}"


def draw(path: str, header: Mapping[str, object], rows: Sequence[Row]) -> str:
    """Writes the picture; returns a line that says what happened."""
    if reason := undrawable(path):
        return f"# no plot: {reason}"
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    panels = _panels(rows)
    if not panels:
        return "# no plot: it needs an operation measured at two sizes at least"
    height = _ROW_HEIGHT * len(panels) + 0.6
    figure, axes = pyplot.subplots(len(panels), 2, figsize=(_SHOWN_WIDTH, height), squeeze=False)
    for (title, chosen), (latency, bandwidth) in zip(panels.items(), axes, strict=True):
        _draw_lines(latency, chosen, "time_us")
        latency.set(title=f"{title}: time", ylabel="microseconds", yscale="log")
        _draw_lines(bandwidth, chosen, "busbw")
        bandwidth.set(title=f"{title}: bus bandwidth", ylabel="GB/s", ylim=(0, None))
        latency.legend(frameon=False, fontsize=8)
    figure.suptitle(_subtitle(header), fontsize=9, color="#555555", x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
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
    contenders = list(dict.fromkeys((row.contender, row.contender_kind) for row in rows))
    colours = iter(_COLOURS * len(contenders))
    moving = [row for row in rows if row.contender_kind != "floor"]
    highest = max((getattr(row, figure) for row in moving), default=0)
    for name, kind in contenders:
        line = [row for row in rows if row.contender == name]
        if kind == "floor" and figure == "busbw":
            continue  # it moves nothing
        sizes, values = [row.size for row in line], [getattr(row, figure) for row in line]
        if kind in ("floor", "limit"):
            dashes = {"color": _DASHED, "linewidth": 1.2, "dashes": _DASHES.get(name, (4, 2))}
            label = "the same, non-temporal" if name == "copy-nt" else LEGEND[kind]
            axes.plot(sizes, values, label=label, zorder=1, **dashes)
            continue
        first = name == contenders[0][0]
        label = f"{name} ({LEGEND[kind]})" if kind in LEGEND else name
        look = {"markersize": 4 if first else 3, "linewidth": 2.4 if first else 1.4}
        look |= {"zorder": 3 if first else 2}
        axes.plot(sizes, values, label=label, color=next(colours), marker="o", **look)
        if figure == "time_us" and kind == "backend":
            low, high = [row.min_us for row in line], [row.max_us for row in line]
            axes.fill_between(sizes, low, high, color=axes.lines[-1].get_color(), alpha=0.15, lw=0)
    if figure == "busbw" and highest:
        axes.set_ylim(top=1.08 * highest)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda size, _: show_size(size))
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("size")
    axes.grid(True, which="major", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _subtitle(header: Mapping[str, object]) -> str:
    machine, versions = header.get("machine"), header.get("versions")
    if not (isinstance(machine, dict) and isinstance(versions, dict)):
        return ""
    about = f"{machine.get('cpu')}, {machine.get('usable_cores')} cores"
    about += f"   torch {versions.get('torch')}, mycoll {versions.get('mycoll')}"
    return f"{about}   {header.get('date', '')}"
