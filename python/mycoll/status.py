"""`mycoll status` and `mycoll top`: what the mycoll processes of this host do, right now.

It reads the memory of the processes (black_box.py), so it works while they hang or are stopped, and
needs no preparation.
"""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict

from mycoll import _terminal, black_box, trace
from mycoll._terminal import folded, table
from mycoll._units import show_seconds
from mycoll.black_box import Group, Process

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
    parsed = parser.parse_args(list(words))
    show = as_json if parsed.json else as_text
    nobody = black_box.NOBODY
    if parsed.pid or parsed.job:
        nobody = "no such mycoll process of this user on this host; `mycoll status` shows all"
    if not watch:
        found = black_box.find(parsed.pid, parsed.job)
        print(show(found) or nobody)
        return 0 if found else 1
    try:
        while True:
            text = show(black_box.find(parsed.pid, parsed.job)) or nobody
            if sys.stdout.isatty():
                text = f"\033[H\033[2J{text}"  # from the upper left corner, on an empty screen
            print(text, flush=True)
            time.sleep(1)
    except KeyboardInterrupt:
        return 0


def as_json(processes: list[Process]) -> str:
    """The processes and the findings, for programs."""
    rows = []
    for process in processes:
        row = asdict(process)
        for group, entry in zip(process.groups, row["groups"], strict=True):
            current = group.current()
            entry["operations"] = entry["operations"][-16:]
            entry["current"] = asdict(current) if current else None
            entry["waits_for_global"] = [group.to_global(r) for r in waits_for(group, processes)]
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
        lines += trace.without_calls(members)
        found = findings(members)
        lines += ["", *(line for each in found for line in folded(each)), ""] if found else [""]
    return "\n".join(lines).rstrip()


def row_of(process: Process, group: Group | None, members: list[Process]) -> tuple[str, ...]:
    """The row of the table for a group of a process."""
    # Running or sleeping says nothing about a rank.
    first = (str(process.rank), str(process.pid), trace.NOT_RUNNING.get(process.state, ""))
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


def waits_for(group: Group, processes: list[Process]) -> list[int]:
    """Ranks of the group that its current collective waits for here.

    A rank on this host says by its own memory whether it has called it; of the others this rank
    knows what it has seen.
    """
    current = group.current()
    if current is None:
        return []
    everywhere = (each for process in processes for each in process.groups)
    known = {each.rank: each.submitted for each in everywhere if each.context == group.context}
    behind = {rank for rank, submitted in known.items() if submitted <= current.sequence}
    behind |= {rank for rank in group.waits_for if rank not in known}
    return sorted(behind or set(group.waits_for))


def findings(processes: list[Process]) -> list[str]:
    """What has waited for long in these processes of a world, and for which ranks, in lines."""
    found = [each for each in trace.analyse(processes) if each.waited > LONG_SECONDS]
    return [line for each in found for line in each.text.splitlines()]
