"""`mycoll status` and `mycoll top`: what the mycoll processes of this host are at, right now.

It asks nobody: it reads what the processes keep in memory (black_box.py), so it works while they
hang or are stopped, and needs no preparation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from mycoll import black_box
from mycoll.black_box import Group, Operation, Process

NOT_RUNNING = {
    "T": "stopped",
    "t": "in a debugger",
    "Z": "ended",
    "X": "ended",
    "D": "in the kernel",
}
NOBODY = "no mycoll processes of this user on this host"
NOT_THOSE = "no such mycoll process of this user on this host; `mycoll status` shows all"
# Waiting for so long is worth a sentence.
LONG_SECONDS = 2.0


def main(words: Sequence[str], watch: bool = False) -> int:
    parser = argparse.ArgumentParser(
        prog="mycoll top" if watch else "mycoll status",
        description="What the mycoll processes of this user on this host are at, and who waits for "
        "whom. Works on processes that hang or are stopped.",
    )
    parser.add_argument("pid", nargs="*", type=int, help="only these processes")
    parser.add_argument("--job", help="only this job (its beginning is enough)")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=positive,
        const=1.0,
        default=1.0 if watch else None,
        metavar="SECONDS",
        help="again and again, until Ctrl-C (default: every second)",
    )
    parsed = parser.parse_args(list(words))

    def look() -> list[Process]:
        found = black_box.find(parsed.pid or None)
        return [each for each in found if each.job.startswith(parsed.job or "")]

    nobody = NOBODY if not (parsed.pid or parsed.job) else NOT_THOSE
    if parsed.watch is None:
        found = look()
        print(as_json(found) if parsed.json else as_text(found) or nobody)
        return 0 if found else 1
    try:
        while True:
            text = as_json(look()) if parsed.json else as_text(look()) or nobody
            if sys.stdout.isatty():
                text = f"\033[H\033[2J{text}"  # from the upper left corner, on an empty screen
            print(text, flush=True)
            time.sleep(max(0.1, parsed.watch))
    except KeyboardInterrupt:
        return 0


def positive(text: str) -> float:
    """For argparse."""
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds to wait")
    return value


def as_json(processes: list[Process]) -> str:
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
    told = [each for world in black_box.related(processes) for each in findings(world)]
    return json.dumps({"processes": rows, "findings": told}, indent=2)


def as_text(processes: list[Process]) -> str:
    lines: list[str] = []
    for members in black_box.related(processes):
        world = max((group.ranks for each in members for group in each.groups), default=0)
        lines.append(
            f"job {members[0].job[:8]} on {members[0].host}: {len(members)} processes here, "
            f"largest group {world} ranks, mycoll {members[0].version}"
        )
        table = [("rank", "pid", "state", "group", "operation", "for", "waits for", "called from")]
        for process in members:
            groups: Sequence[Group | None] = process.groups or [None]
            table += [row_of(process, group, members) for group in groups]
        lines += aligned(table)
        told = list(findings(members))
        lines += ["", *told, ""] if told else [""]
    return "\n".join(lines).rstrip()


def row_of(
    process: Process, group: Group | None, members: list[Process]
) -> tuple[str, str, str, str, str, str, str, str]:
    state = NOT_RUNNING.get(process.state, "runs" if process.state == "R" else "sleeps")
    who = (str(process.rank), str(process.pid), state)
    if group is None:
        return (*who, "-", "no group", "", "", "")
    if group.phase == "failed":
        reason = next(iter(group.failure.splitlines()), "")
        return (*who, group.title, f"failed: {reason}"[:70], "", "", "")
    operation = busy_with(group)
    if operation is None:
        last = group.last()
        text = (
            f"idle, {group.submitted} collectives" if last is None else f"idle, last {call(last)}"
        )
        ago = "" if last is None or last.ended is None else seconds(process.taken - last.ended)
        return (*who, group.title, text, ago, "", "")
    waits = ", ".join(str(group.to_global(r)) for r in waits_for(group, members))
    waits += f" and {group.waits_for_more} more" if waits and group.waits_for_more else ""
    if operation.is_message:
        waits = "any" if operation.peer < 0 else str(group.to_global(operation.peer))
    since = seconds(process.taken - operation.enqueued)
    return (*who, group.title, call(operation), since, waits, operation.site)


def busy_with(group: Group) -> Operation | None:
    return group.current() or next(iter(group.open_messages()), None)


def call(operation: Operation) -> str:
    number = "" if operation.is_message else f" #{operation.sequence}"
    name, *more = operation.describe().split(" ", 1)
    return f"{name}{number} {' '.join(more)}".rstrip()


def seconds(value: float) -> str:
    if value < 1e-3:
        return f"{max(0.0, value) * 1e6:.0f} us"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 100:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 6000 else f"{value / 3600:.1f} h"


def peers(group: Group, processes: list[Process]) -> dict[int, tuple[Process, Group]]:
    """The same group in the processes that were read, by its rank there."""
    return {
        other.rank: (process, other)
        for process in processes
        for other in process.groups
        if other.context == group.context
    }


def waits_for(group: Group, processes: list[Process]) -> list[int]:
    """Ranks of the group that its current collective waits for here.

    Who has not called it yet is told by that rank's own memory, where it is on this host; else by
    what this rank has seen.
    """
    current = group.current()
    if current is None:
        return []
    known = peers(group, processes)
    behind = {rank for rank, (_, other) in known.items() if other.submitted <= current.sequence}
    behind |= {rank for rank in group.waits_for if rank not in known}
    return sorted(behind or set(group.waits_for))


def findings(processes: list[Process]) -> Iterator[str]:
    """Sentences about who waits for whom: one for each group in which somebody waits long."""
    by_rank = {each.rank: each for each in processes}
    for context in sorted({group.context for each in processes for group in each.groups}):
        known = {
            group.rank: (process, group)
            for process in processes
            for group in process.groups
            if group.context == context
        }
        waiting: list[tuple[float, Process, Group, Operation]] = []
        for process, group in known.values():
            current = group.current()
            if current is not None and process.taken - current.enqueued > LONG_SECONDS:
                waiting.append((process.taken - current.enqueued, process, group, current))
        if not waiting:
            continue
        waited, _, group, operation = max(waiting, key=lambda each: each[0])
        ranks = ", ".join(str(g.to_global(g.rank)) for _, _, g, _ in waiting)
        missing = waits_for(group, processes)
        yield (
            f"group {group.title}: {call(operation)} has waited {seconds(waited)} on rank {ranks}"
            + ("" if missing else "; all ranks that can be seen from here have called it")
        )
        for rank in missing:
            number = group.to_global(rank)
            yield f"  rank {number} {absence(rank, known, by_rank.get(number))}"


def absence(
    rank: int, known: dict[int, tuple[Process, Group]], there: Process | None = None
) -> str:
    """`there`: a process that has its number, and not the group."""
    if rank not in known and there is not None:
        return f"(pid {there.pid}) has left the group, or has not made it yet"
    if rank not in known:
        return "has not called it; it does not run on this host, or has ended"
    process, group = known[rank]
    state = NOT_RUNNING.get(process.state)
    text = f"(pid {process.pid}) has not called it" + (f": it is {state}" if state else "")
    busy = [each for each in process.groups if busy_with(each) is not None]
    last = group.last()
    if busy:
        operation = busy_with(busy[0])
        assert operation is not None
        text += f"; it is in {call(operation)} of group {busy[0].title}"
    elif last is not None and last.ended is not None:
        text += f"; its last was {call(last)}, {seconds(process.taken - last.ended)} ago"
    else:
        text += "; it has called nothing yet"
    return text if state else f"{text} (its Python: py-spy dump --pid {process.pid})"


def aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    keep = [i for i, title in enumerate(table[0]) if any(row[i] for row in table[1:])]
    return ["  ".join(row[i].ljust(widths[i]) for i in keep).rstrip() for row in table]
