"""`mycoll metrics`: counters of the mycoll processes of this host, in Prometheus' text format.

They are read from outside, out of the same memory that `mycoll status` reads (black_box.py): the
processes do nothing for it, and those that hang are seen as well.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mycoll import _terminal, _units, black_box
from mycoll.black_box import Counts, Group, Process

# Operations of groups that are gone are still counted, so that a sum over groups never falls.
ENDED = "(ended)"


def waited(process: Process, group: Group) -> float:
    """For how many seconds the oldest operation that is not over has waited."""
    since = [each.enqueued for each in group.operations if not each.is_over]
    return max(0.0, process.taken - min(since, default=process.taken))


# Names after "mycoll_", meanings, and values: of Counts, or of a group in a process.
COUNTERS: tuple[tuple[str, str, Callable[[Counts], float]], ...] = (
    ("operations_total", "Operations that have ended well.", lambda c: c.done),
    ("operation_failures_total", "Operations that have failed.", lambda c: c.failed),
    ("operation_bytes_total", "Sum of the larger of input and output.", lambda c: c.bytes),
    ("operation_seconds_total", "Sum of the times from call to end.", lambda c: c.seconds),
)
GAUGES: tuple[tuple[str, str, Callable[[Process, Group], float]], ...] = (
    ("group_failed", "1 when the group has failed.", lambda _, group: int(group.phase == "failed")),
    ("waiting_seconds", "How long the oldest operation that is not over has waited.", waited),
)


def main(words: Sequence[str]) -> int:
    """Runs `mycoll metrics` with these words; returns the exit code."""
    parser = _terminal.Parser(
        prog="mycoll metrics",
        description="Counters of this user's mycoll processes on this host, in Prometheus' text "
        "format: printed, or written for the textfile collector of node_exporter.",
    )
    text = "write there, whole or not at all (NAME.prom)"
    parser.add_argument("--file", type=Path, metavar="PATH", help=text)
    text = "with --file: until Ctrl-C"
    parser.add_argument("--every", type=_units.seconds, metavar="SECONDS", help=text)
    parsed = parser.parse_args(list(words))
    if parsed.file and not parsed.file.name:
        parser.error(f"--file {parsed.file} is not the name of a file")
    if parsed.every and not parsed.file:
        parser.error("--every needs --file: what is printed is printed once")
    if not parsed.file:
        processes = black_box.find()
        print(as_text(processes), end="")
        if not processes:
            print(f"mycoll metrics: {black_box.NOBODY}", file=sys.stderr)
        return 0 if processes else 1
    try:
        write(parsed.file)
        while parsed.every:
            time.sleep(parsed.every)
            write(parsed.file)
    except OSError as error:
        print(f"mycoll metrics: {parsed.file} could not be written: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def write(path: Path) -> None:
    """Writes the metrics; a reader sees all of them or those before."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(as_text(black_box.find()), encoding="utf-8")
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def as_text(processes: list[Process]) -> str:
    """The metrics of these processes, in Prometheus' format."""
    counts: list[tuple[str, Counts]] = []
    groups: list[tuple[str, Process, Group]] = []
    for process in processes:
        for group in (*process.groups, None):
            by_kind = group.counts if group else process.ended
            counts += [(labelled(process, group, kind), each) for kind, each in by_kind.items()]
            if group:
                groups.append((labelled(process, group), process, group))
    lines = []
    for name, meaning, value in COUNTERS:
        rows = [(labels, value(each)) for labels, each in counts]
        lines += family(name, "counter", meaning, rows)
    for name, meaning, look in GAUGES:
        rows = [(labels, look(process, group)) for labels, process, group in groups]
        lines += family(name, "gauge", meaning, rows)
    return "\n".join([*lines, ""])


def family(name: str, kind: str, meaning: str, rows: list[tuple[str, float]]) -> list[str]:
    """The lines of a metric. Readers refuse a file in which a series is there twice; a group that
    has failed and is still there may have the name of its successor."""
    series: dict[str, float] = {}
    for labels, value in rows:
        before = series.get(labels, 0)
        series[labels] = before + value if kind == "counter" else max(before, value)
    lines = [f"mycoll_{name}{labels} {value}" for labels, value in series.items()]
    return [f"# HELP mycoll_{name} {meaning}", f"# TYPE mycoll_{name} {kind}", *lines]


def labelled(process: Process, group: Group | None, operation: str = "") -> str:
    """The labels of a series, in braces."""
    labels = {"rank": str(process.rank), "pid": str(process.pid)}
    labels |= {"group": group.name, "description": group.description} if group else {"group": ENDED}
    labels["operation"] = operation
    for key, text in labels.items():
        labels[key] = text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return "{" + ",".join(f'{key}="{each}"' for key, each in labels.items() if each) + "}"
