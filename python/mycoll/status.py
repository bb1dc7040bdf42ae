"""`mycoll status` and `mycoll top`: what the mycoll processes of this host do, right now.

It reads the memory of the processes (black_box.py), so it works while they hang or are stopped, and
needs no preparation.
"""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from mycoll import _terminal, _units, black_box
from mycoll._terminal import folded, table
from mycoll._units import show_seconds
from mycoll.black_box import Group, Members, Operation, Process

NOT_RUNNING = {"T": "stopped", "t": "in a debugger", "Z": "ended", "D": "in the kernel"}
NOBODY = "no mycoll processes of this user on this host"
NOT_THOSE = "no such mycoll process of this user on this host; `mycoll status` shows all"
# Waiting for so long is worth a sentence.
LONG_SECONDS = 2.0


def main(words: Sequence[str], watch: bool = False) -> int:
    """Runs `mycoll status`, or `mycoll top`, with these words; returns the exit code."""
    parser = _terminal.Parser(
        prog="mycoll top" if watch else "mycoll status",
        description="Shows what this user's mycoll processes on this host do now, and which rank "
        "waits for which. Works on processes that hang or are stopped.",
    )
    parser.add_argument("pid", nargs="*", type=int, help="only these processes")
    parser.add_argument("--job", default="", help="only this job (its beginning is enough)")
    parser.add_argument("--json", action="store_true", help="for programs")
    every: dict[str, Any] = {"const": 1.0, "default": 1.0 if watch else None, "metavar": "SECONDS"}
    text = "repeat until Ctrl-C (default: every second)"
    parser.add_argument("--watch", nargs="?", type=_units.seconds, **every, help=text)
    parsed = parser.parse_args(list(words))
    show = as_json if parsed.json else as_text
    nobody = NOBODY if not (parsed.pid or parsed.job) else NOT_THOSE
    if parsed.watch is None:
        found = black_box.find(parsed.pid, parsed.job)
        print(show(found) or nobody)
        return 0 if found else 1
    try:
        while True:
            text = show(black_box.find(parsed.pid, parsed.job)) or nobody
            if sys.stdout.isatty():
                text = f"\033[H\033[2J{text}"  # from the upper left corner, on an empty screen
            print(text, flush=True)
            time.sleep(parsed.watch)
    except KeyboardInterrupt:
        return 0


def as_json(processes: list[Process]) -> str:
    """The processes and the findings, for programs."""
    rows = []
    for process in processes:
        row = asdict(process)
        row["groups"] = []
        for group in process.groups:
            current = group.current()
            entry = asdict(group)
            entry["operations"] = entry["operations"][-16:]
            entry["current"] = asdict(current) if current else None
            entry["waits_for_global"] = [group.to_global(r) for r in waits_for(group, processes)]
            row["groups"].append(entry)
        rows.append(row)
    found = [each for world in black_box.related(processes) for each in findings(world)]
    return json.dumps({"processes": rows, "findings": found}, indent=2)


def as_text(processes: list[Process]) -> str:
    """A table for each world, and the findings."""
    lines: list[str] = []
    for members in black_box.related(processes):
        world = max((group.ranks for each in members for group in each.groups), default=0)
        ciphers = {each.encryption for process in members for each in process.groups}
        encrypted = "".join(f", encrypted: {each}" for each in sorted(ciphers - {""}))
        lines += folded(
            f"job {members[0].job[:8]} on {members[0].host}: {len(members)} processes here, "
            f"largest group {world} ranks, mycoll {members[0].version}{encrypted}"
        )
        rows: list[tuple[str, ...]] = [
            ("rank", "pid", "state", "group", "for", "waits for", "operation")
        ]
        for process in members:
            used = [each for each in process.groups if each.is_used]
            groups: Sequence[Group | None] = used or process.groups[:1] or [None]
            rows += [row_of(process, group, members) for group in groups]
        lines += table(rows)
        lines += without_calls(members)
        found = list(findings(members))
        lines += ["", *(line for each in found for line in folded(each)), ""] if found else [""]
    return "\n".join(lines).rstrip()


def without_calls(members: list[Process]) -> list[str]:
    """A line for all groups in which no rank has called anything, folded; or none."""
    groups = [group for each in members for group in each.groups]
    used = {group.title for group in groups if group.is_used}
    unused = [title for title in dict.fromkeys(each.title for each in groups) if title not in used]
    return folded(f"groups without calls: {', '.join(unused)}") if unused else []


def row_of(process: Process, group: Group | None, members: list[Process]) -> tuple[str, ...]:
    """The row of the table for a group of a process."""
    # Running or sleeping says nothing about a rank.
    first = (str(process.rank), str(process.pid), NOT_RUNNING.get(process.state, ""))
    if group is None:
        return (*first, "-", "", "", "in no group")
    if group.phase == "failed":
        reason = next(iter(group.failure.splitlines()), "")
        reason = textwrap.shorten(reason, 100, placeholder=" ...")
        return (*first, group.title, "", "", f"failed: {reason}")
    operation = group.busy_with()
    if operation is None:
        last = group.last()
        if last is None:
            return (*first, group.title, "", "", "no calls")
        ago = "" if last.ended is None else show_seconds(process.taken - last.ended)
        return (*first, group.title, ago, "", f"idle, last {last.call()}")
    waits = ", ".join(str(group.to_global(r)) for r in waits_for(group, members))
    waits += f" and {group.waits_for_more} more" if waits and group.waits_for_more else ""
    if operation.is_message:
        waits = "any" if operation.peer < 0 else str(group.to_global(operation.peer))
    since = show_seconds(process.taken - operation.enqueued)
    site = f", at {operation.site}" if operation.site else ""
    return (*first, group.title, since, waits, f"{operation.call()}{site}")


def peers(group: Group, processes: list[Process]) -> Members:
    """The same group in the processes that were read, by its rank there."""
    return {
        other.rank: (process, other)
        for process in processes
        for other in process.groups
        if other.context == group.context
    }


def waits_for(group: Group, processes: list[Process]) -> list[int]:
    """Ranks of the group that its current collective waits for here.

    A rank on this host says by its own memory whether it has called it; of the others this rank
    knows what it has seen.
    """
    current = group.current()
    if current is None:
        return []
    known = peers(group, processes)
    behind = {rank for rank, (_, other) in known.items() if other.submitted <= current.sequence}
    behind |= {rank for rank in group.waits_for if rank not in known}
    return sorted(behind or set(group.waits_for))


def findings(processes: list[Process]) -> Iterator[str]:
    """Yields which rank waits for which: a sentence for each group in which a rank waits long."""
    by_rank = {each.rank: each for each in processes}
    groups = {group.context: group for each in processes for group in each.groups}
    for _, some in sorted(groups.items()):
        known = peers(some, processes)
        waiting: list[tuple[float, Group, Operation]] = []
        for process, group in known.values():
            current = group.current()
            if current is not None and process.taken - current.enqueued > LONG_SECONDS:
                waiting.append((process.taken - current.enqueued, group, current))
        if not waiting:
            continue
        waited, group, operation = max(waiting, key=lambda each: each[0])
        ranks = ", ".join(str(each.to_global(each.rank)) for _, each, _ in waiting)
        missing = waits_for(group, processes)
        yield (
            f"group {group.title}: {operation.call()} has waited {show_seconds(waited)} on rank "
            + ranks
            + ("" if missing else "; all ranks that can be seen from here have called it")
        )
        for rank in missing:
            number = group.to_global(rank)
            yield f"  rank {number} {absence(rank, known, by_rank.get(number))}"


def absence(rank: int, known: Members, there: Process | None = None) -> str:
    """Why a rank is missing; `there` is a process that has its number, and not the group."""
    if rank not in known and there is not None:
        return f"(pid {there.pid}) has left the group, or has not made it yet"
    if rank not in known:
        return "has not called it; it does not run on this host, or has ended"
    process, group = known[rank]
    state = NOT_RUNNING.get(process.state)
    text = f"(pid {process.pid}) has not called it" + (f": it is {state}" if state else "")
    busy = [(each, current) for each in process.groups if (current := each.busy_with())]
    last = group.last()
    if busy:
        other, operation = busy[0]
        text += f"; it is in {operation.call()} of group {other.title}"
    elif last is not None and last.ended is not None:
        text += f"; its last was {last.call()}, {show_seconds(process.taken - last.ended)} ago"
    else:
        text += "; it has called nothing yet"
    return text if state else f"{text} (its Python: py-spy dump --pid {process.pid})"
