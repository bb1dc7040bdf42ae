"""Writes what the ranks did last as a Chrome trace, for https://ui.perfetto.dev.

A rank is a process of the trace, a group a row of it, and a call a slice. Calls that overlap get
more rows. Each finding of `mycoll trace` is a mark in the row of the rank to look at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mycoll.black_box import Members, Operation

Groups = Mapping[str, Members]  # by title
Event = dict[str, Any]

_ROWS = 1000  # of a group at most


def write(groups: Groups, findings: Sequence[Any], path: Path) -> None:
    """Writes the members of these groups, and the findings about them.

    Raises:
        OSError: The file cannot be written.
    """
    known = [each for members in groups.values() for each in members.values()]
    operations = [each for _, group in known for each in group.operations if each.enqueued]
    # Numbers in JSON have 53 bits: too few for the nanoseconds since 1970. torch.profiler's traces
    # have this field, too.
    base = math.floor(min((each.enqueued for each in operations), default=0.0))
    events = [*_names(groups), *_slices(groups, base), *_marks(groups, findings, base)]
    trace = {"baseTimeNanoseconds": base * 10**9, "traceEvents": events}
    path.write_text(json.dumps(trace), encoding="utf-8")


def _names(groups: Groups) -> Iterator[Event]:
    """The names of the processes: also of ranks that have no trace."""
    names: dict[int, str] = {}
    for members in groups.values():
        _, first = next(iter(members.values()))
        names = {rank: f"rank {rank} (no trace)" for rank in first.global_ranks} | names
        for process, _ in members.values():
            names[process.rank] = f"rank {process.rank} ({process.host}:{process.pid})"
    for rank, name in names.items():
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}


def _slices(groups: Groups, base: float) -> Iterator[Event]:
    for number, (title, members) in enumerate(groups.items(), 1):
        for process, group in members.values():
            ends: list[float] = []  # of the last call in each row
            for operation in sorted(group.operations, key=lambda each: each.enqueued):
                if not operation.enqueued:
                    continue
                end = (operation.is_over and operation.ended) or process.taken
                free = (row for row, last in enumerate(ends) if last <= operation.enqueued)
                row = min(next(free, len(ends)), _ROWS - 1)
                ends[row : row + 1] = [end]
                place = {"pid": process.rank, "tid": number * _ROWS + row}
                length = max(0.0, end - operation.enqueued) * 1e6
                time = {"ts": (operation.enqueued - base) * 1e6, "dur": length}
                call = {"name": operation.kind, "cat": title, "args": _arguments(operation)}
                yield {"ph": "X", **place, **time, **call}
            for row in range(max(1, len(ends))):
                place = {"pid": process.rank, "tid": number * _ROWS + row}
                args = {"name": f"group {title}"}
                yield {"ph": "M", **place, "name": "thread_name", "args": args}


def _arguments(operation: Operation) -> Event:
    """The details that Perfetto shows when a call is selected."""
    found: Event = {"call": operation.describe(), "state": operation.state}
    if not operation.is_message:
        found["number"] = operation.sequence
    if operation.site:
        found["at"] = operation.site
    if operation.started is not None:
        found["queued us"] = round((operation.started - operation.enqueued) * 1e6, 3)
    return found


def _marks(groups: Groups, findings: Sequence[Any], base: float) -> Iterator[Event]:
    for number, (title, members) in enumerate(groups.items(), 1):
        end = max(process.taken for process, _ in members.values())
        for finding in findings:
            for rank in finding.ranks if finding.group == title else ():
                place = {"pid": rank, "tid": number * _ROWS, "ts": (end - base) * 1e6}
                args = {"text": finding.text}
                yield {"ph": "i", "s": "t", **place, "name": finding.kind, "args": args}
