"""Draws what the ranks did last: a lane for each rank and group, a bar for each operation. Beside a
lane stands its call that did not end well, so that the eye can compare those of all ranks.

A picture whose name ends with .svg is written by hand, without anything installed; other kinds
(.png, .pdf) need matplotlib.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from mycoll.black_box import Group, Operation, Process
from mycoll.status import seconds

# Also for people who cannot tell red from green (Okabe and Ito).
COLOURS = {
    "all_reduce": "#0072B2",
    "all_gather": "#009E73",
    "reduce_scatter": "#56B4E9",
    "broadcast": "#E69F00",
    "all_to_all": "#CC79A7",
    "barrier": "#8c8c8c",
    "monitored_barrier": "#8c8c8c",
    "send": "#b3a100",
    "recv": "#6b6100",
    "put": "#b3a100",
    "signal": "#b3a100",
    "wait_signal": "#6b6100",
    "window": "#8c8c8c",
}
OTHER = "#7a68a6"
WRONG = "#d62728"
PALE = "#f4f4f4"
INK = "#222222"

WIDTH = 1180
LEFT, RIGHT, TOP = 190, 310, 64  # behind the lanes is room for a call in words
WORDS = 50  # letters that fit there
LANE = 30
BAR = 16


class Canvas(Protocol):
    """Pixels from the upper left corner."""

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, edge: str = "", tip: str = ""
    ) -> None: ...
    def line(
        self, x0: float, y0: float, x1: float, y1: float, colour: str, dashed: bool = False
    ) -> None: ...
    def text(
        self, x: float, y: float, text: str, size: int, colour: str, anchor: str = "start"
    ) -> None: ...
    def save(self, path: Path) -> None: ...


KINDS = (".svg", ".png", ".pdf")

Groups = Mapping[str, Mapping[int, tuple[Process, Group]]]  # by title; members by rank in the group


def draw(groups: Groups, findings: Sequence[Any], path: Path, last: float | None = None) -> None:
    lanes = _lanes(groups, findings)
    clock = _Clock(lanes, last)
    height = TOP + LANE * len(lanes) + 62
    canvas: Canvas
    canvas = (
        SvgCanvas(WIDTH, height) if path.suffix.lower() == ".svg" else PlotCanvas(WIDTH, height)
    )
    _Picture(canvas, lanes, clock).paint(findings)
    canvas.save(path)


@dataclass
class Lane:
    title: str
    note: str
    process: Process | None  # None: there is no trace of this rank
    operations: list[Operation] = field(default_factory=list)
    wrong: set[int] = field(default_factory=set)  # numbers of collectives to look at
    is_culprit: bool = False

    def is_wrong(self, operation: Operation) -> bool:
        return operation.state != "done" or (
            not operation.is_message and operation.sequence in self.wrong
        )

    def words(self) -> str:
        """What to compare with the other lanes."""
        calls = {each.sequence: each for each in self.operations if not each.is_message}
        for sequence in sorted(self.wrong):
            if sequence not in calls:
                return f"#{sequence} was not called"
            return f"#{sequence} {calls[sequence].describe()}"
        return next((each.describe() for each in self.operations if self.is_wrong(each)), "")


def _lanes(groups: Groups, findings: Sequence[Any]) -> list[Lane]:
    lanes: list[Lane] = []
    for title, by_rank in groups.items():
        members = {each[1].to_global(rank): each for rank, each in by_rank.items()}
        group = next(iter(members.values()))[1]
        of_group = [each for each in findings if each.group == title]
        blamed = {rank for each in of_group for rank in each.ranks}
        wrong = {each.sequence for each in of_group if each.sequence >= 0}
        if not any(each.is_used for _, each in members.values()):
            continue
        for rank in group.global_ranks or sorted(members):
            name = f"rank {rank}" if len(groups) == 1 else f"rank {rank}, group {title}"
            if rank not in members:
                lanes.append(Lane(name, "no trace", None, is_culprit=rank in blamed))
                continue
            process, mine = members[rank]
            note = f"{process.host}:{process.pid}" if process.pid else ""
            operations = [each for each in mine.operations if each.enqueued]
            lanes.append(Lane(name, note, process, operations, wrong, rank in blamed))
    return lanes


# How many of a lane's operations are drawn without --last.
SHOWN = 40


class _Clock:
    """Where a moment stands in the picture: pauses are squeezed, the more the longer they are.

    A hang lasts a million times as long as the operations before it, and both have to be seen. The
    order is never changed.
    """

    POWER = 0.3

    def __init__(self, lanes: list[Lane], last: float | None) -> None:
        known = [lane.process for lane in lanes if lane.process is not None]
        self.end = max((process.taken for process in known), default=1.0)
        first = min((_begin(lane) for lane in lanes if lane.operations), default=self.end - 1.0)
        self.begin = first if last is None else self.end - last
        moments = {self.begin, self.end}
        for lane in lanes:
            for each in lane.operations:
                moments |= {each.enqueued, each.ended or self.end}
        self.moments = sorted(each for each in moments if self.begin <= each <= self.end)
        self.places = [0.0]
        for before, after in pairwise(self.moments):
            self.places.append(self.places[-1] + (after - before) ** self.POWER)
        self.whole = self.places[-1] or 1.0

    def share(self, moment: float) -> float:
        """From 0 to 1."""
        if moment <= self.begin:
            return 0.0
        if moment >= self.end:
            return 1.0
        index = bisect_right(self.moments, moment)
        before, after = self.moments[index - 1], self.moments[index]
        inside = (moment - before) / (after - before)
        place = self.places[index - 1] + inside * (self.places[index] - self.places[index - 1])
        return place / self.whole

    def marks(self, count: int) -> list[tuple[float, float]]:
        """Moments to write at the axis, with their places: not closer than they can be read."""
        chosen = [(self.end, 1.0)]
        for moment in reversed(self.moments):
            place = self.share(moment)
            if chosen[-1][1] - place >= 1 / count:
                chosen.append((moment, place))
        return chosen


def _begin(lane: Lane) -> float:
    return lane.operations[-SHOWN:][0].enqueued


def paler(colour: str) -> str:
    """Of a call that ended well: half way to white."""
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{(part + 255) // 2:02x}" for part in parts)


class _Picture:
    def __init__(self, canvas: Canvas, lanes: list[Lane], clock: _Clock) -> None:
        self.canvas, self.lanes, self.clock = canvas, lanes, clock

    def x(self, moment: float) -> float:
        return LEFT + self.clock.share(moment) * (WIDTH - LEFT - RIGHT)

    def paint(self, findings: Sequence[Any]) -> None:
        canvas = self.canvas
        canvas.text(LEFT, 26, "What the ranks did last", 16, INK)
        headline = next((each.text.splitlines()[0] for each in findings), "no difference")
        canvas.text(LEFT, 46, headline[:150], 12, WRONG if findings else INK)
        for index, lane in enumerate(self.lanes):
            self.ground(lane, TOP + index * LANE)
        self.axis(TOP + len(self.lanes) * LANE)
        for index, lane in enumerate(self.lanes):
            self.lane(lane, TOP + index * LANE)
        self.legend(TOP + len(self.lanes) * LANE + 44)

    def ground(self, lane: Lane, y: float) -> None:
        colour = WRONG if lane.is_culprit else INK
        fill = "#fdecec" if lane.is_culprit else PALE
        self.canvas.box(LEFT, y + 2, WIDTH - LEFT - RIGHT, LANE - 4, fill)
        self.canvas.text(LEFT - 10, y + 15, lane.title, 12, colour, "end")
        self.canvas.text(LEFT - 10, y + 26, lane.note, 9, "#777777", "end")

    def lane(self, lane: Lane, y: float) -> None:
        canvas = self.canvas
        if lane.process is None:
            canvas.text(
                LEFT + 8, y + 20, "no trace of it: it had died, or could not write", 11, WRONG
            )
            return
        for operation in lane.operations:
            stop = operation.ended if operation.is_over and operation.ended else lane.process.taken
            if stop < self.clock.begin:
                continue
            x0, x1 = self.x(operation.enqueued), self.x(stop)
            is_wrong = lane.is_wrong(operation)
            colour = COLOURS.get(operation.kind, OTHER)
            tip = f"#{operation.sequence} {operation.describe()}, {operation.state}, "
            tip += f"{(stop - operation.enqueued) * 1e3:.3f} ms"
            tip += f", {operation.site}" if operation.site else ""
            canvas.box(
                x0,
                y + (LANE - BAR) / 2,
                max(1.5, x1 - x0),
                BAR,
                colour if is_wrong else paler(colour),
                INK if is_wrong else "",
                tip,
            )
        words = lane.words()
        if len(words) > WORDS:
            words = words[: WORDS - 1] + "\u2026"
        canvas.text(WIDTH - RIGHT + 12, y + 20, words, 11, WRONG if lane.is_culprit else INK)
        if lane.is_culprit and lane.operations:
            # From here on it did nothing in this group that the others waited for.
            final = max(each.ended or lane.process.taken for each in lane.operations)
            if self.x(final) < WIDTH - RIGHT - 10:
                y_mid = y + LANE / 2
                canvas.line(self.x(final), y_mid, WIDTH - RIGHT, y_mid, WRONG, dashed=True)

    def axis(self, y: float) -> None:
        """Lines through all lanes, and the time from each to the next."""
        marks = sorted(self.clock.marks(11))
        for _, place in marks:
            x = LEFT + place * (WIDTH - LEFT - RIGHT)
            self.canvas.line(x, TOP, x, y + 4, "#dddddd")
        for (before, left), (after, right) in pairwise(marks):
            x = LEFT + (left + right) / 2 * (WIDTH - LEFT - RIGHT)
            self.canvas.text(x, y + 16, seconds(after - before), 10, "#555555", "middle")
        self.canvas.text(LEFT - 10, y + 16, "time from line to line", 9, "#777777", "end")

    def legend(self, y: float) -> None:
        kinds = sorted({each.kind for lane in self.lanes for each in lane.operations})
        x = float(LEFT)
        for kind in kinds[:10]:
            self.canvas.box(x, y - 9, 10, 10, COLOURS.get(kind, OTHER))
            self.canvas.text(x + 14, y, kind, 10, INK)
            x += 26 + 6.2 * len(kind)
        self.canvas.box(x, y - 9, 10, 10, "#ffffff", INK)
        self.canvas.text(x + 14, y, "failed, not over, or different", 10, INK)


class SvgCanvas:
    def __init__(self, width: int, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, edge: str = "", tip: str = ""
    ) -> None:
        stroke = f' stroke="{edge}" stroke-width="1.5"' if edge else ""
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="2" '
            f'fill="{fill}"{stroke}>{title}</rect>'
        )

    def line(
        self, x0: float, y0: float, x1: float, y1: float, colour: str, dashed: bool = False
    ) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" '
            f'stroke="{colour}"{dash}/>'
        )

    def text(
        self, x: float, y: float, text: str, size: int, colour: str, anchor: str = "start"
    ) -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" '
            f'text-anchor="{anchor}">{escape(text)}</text>'
        )

    def save(self, path: Path) -> None:
        path.write_text("\n".join([*self.parts, "</svg>", ""]), encoding="utf-8")


class PlotCanvas:
    """The same on matplotlib."""

    def __init__(self, width: int, height: int) -> None:
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise SystemExit(
                "mycoll trace: this kind of picture needs matplotlib (pip install matplotlib); "
                "a name that ends with .svg needs nothing"
            ) from error
        self.figure = Figure(figsize=(width / 100, height / 100), dpi=200)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(height, 0)
        self.axes.axis("off")
        self.layer = 1.0  # what is drawn later lies above

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, edge: str = "", tip: str = ""
    ) -> None:
        from matplotlib.patches import Rectangle

        line: dict[str, Any] = {"edgecolor": edge, "linewidth": 1.2} if edge else {"linewidth": 0}
        self.layer += 0.001
        self.axes.add_patch(Rectangle((x, y), w, h, facecolor=fill, zorder=self.layer, **line))

    def line(
        self, x0: float, y0: float, x1: float, y1: float, colour: str, dashed: bool = False
    ) -> None:
        style = "--" if dashed else "-"
        self.layer += 0.001
        self.axes.plot(
            [x0, x1], [y0, y1], color=colour, linestyle=style, linewidth=0.8, zorder=self.layer
        )

    def text(
        self, x: float, y: float, text: str, size: int, colour: str, anchor: str = "start"
    ) -> None:
        align = {"start": "left", "middle": "center", "end": "right"}[anchor]
        self.layer += 0.001
        self.axes.text(
            x,
            y,
            text,
            fontsize=size * 0.72,
            color=colour,
            ha=align,
            va="baseline",
            zorder=self.layer,
        )

    def save(self, path: Path) -> None:
        self.figure.savefig(path)
