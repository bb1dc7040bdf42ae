"""`mycoll trace`: compares what the ranks did last: which is missing, differs, or waits.

It reads the files that processes write at a failure (or mycoll.dump_trace), or, with --live, the
memory of those that run here. `--export` writes a timeline of the ranks for Perfetto.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mycoll import _terminal, black_box, timeline
from mycoll._units import show_seconds
from mycoll.black_box import Members, Operation, Process, default_folder, load_all

NOT_RUNNING = {"T": "stopped", "t": "in a debugger", "Z": "ended", "D": "in the kernel"}

Calls = dict[int, Operation]  # by rank in the group


@dataclass
class Finding:
    """Something that is not as it should be, in one group."""

    kind: str  # "differs", "absent", "no trace", "unfinished", "message", "failed"
    group: str  # its title
    text: str
    sequence: int = -1
    ranks: list[int] = field(default_factory=list)  # of the job: those to look at
    waited: float = 0.0  # seconds


def main(words: Sequence[str]) -> int:
    """Runs `mycoll trace` with these words; returns the exit code."""
    parser = _terminal.Parser(
        prog="mycoll trace",
        description="Compares what the ranks did last: which is missing, differs, or waits.",
    )
    text = f"files, or folders of them (default: the latest job in {default_folder()})"
    parser.add_argument("trace", nargs="*", type=Path, help=text)
    parser.add_argument("--live", action="store_true", help="the processes that run here, instead")
    text = "write a Chrome trace, for https://ui.perfetto.dev"
    parser.add_argument("--export", type=Path, metavar="FILE.json", help=text)
    parser.add_argument("--json", action="store_true", help="for programs")
    parsed = parser.parse_args(list(words))
    if parsed.live and parsed.trace:
        parser.error("--live compares processes that run; name no traces with it")
    if parsed.live:
        found = black_box.find()
        problems = [] if found else [black_box.NOBODY]
    else:
        found, problems = load_all(parsed.trace or [default_folder()])
    for problem in problems:
        print(f"mycoll trace: {problem}", file=sys.stderr)
    if not found:
        return 2
    # The latest world first: files stay, and a folder may hold those of several jobs.
    latest_first = sorted(black_box.related(found), key=written, reverse=True)
    worlds = [(members, list(analyse(members))) for members in latest_first]
    if parsed.json:
        rows = [asdict(each) for _, findings in worlds for each in findings]
        print(json.dumps({"findings": rows}, indent=2))
    else:
        if not parsed.trace and not parsed.live:
            ago = show_seconds(time.time() - written(found))
            print(f"the latest job that failed, {ago} ago: {default_folder() / found[0].job}\n")
        print("\n\n".join(paragraphs(worlds)))
    if parsed.export:
        members, findings = worlds[0]
        timeline.write(by_title(members), findings, parsed.export)
        if not parsed.json:
            print(f"\nwritten: {parsed.export}; open it in https://ui.perfetto.dev")
    return 1 if any(findings for _, findings in worlds) else 0


def written(members: list[Process]) -> float:
    """When the newest of these traces was written."""
    return max(each.taken for each in members)


def paragraphs(worlds: list[tuple[list[Process], list[Finding]]]) -> Iterator[str]:
    """Yields a text for each world, the latest first."""
    latest = written(worlds[0][0])
    for number, (members, findings) in enumerate(worlds):
        heading = ""
        if len(worlds) > 1:
            ago = f", {show_seconds(latest - written(members))} earlier" if number else ""
            heading = f"job {members[0].job[:8]}{ago}: "
        yield heading + as_text(members, findings)


def as_text(processes: list[Process], results: list[Finding]) -> str:
    """The processes of a world, their groups, and what was found."""
    places = [(each.rank, f" ({each.host}:{each.pid})" if each.pid else "") for each in processes]
    ranks = ", ".join(f"{rank}{place}" for rank, place in places)
    lines = [f"{len(processes)} ranks: {ranks}"]
    for name, members in by_title(processes).items():
        group = members[min(members)][1]
        calls = sum(len(each.operations) for _, each in members.values())
        if calls:
            lines.append(f"group {name}: {group.ranks} ranks, {calls} calls remembered")
    lines += [*without_calls(processes), ""]
    lines += [line for each in results for line in each.text.splitlines()]
    if not results:
        lines.append("no difference in what they remember, and nothing waits")
    return "\n".join(part for line in lines for part in _terminal.folded(line) or [""])


def without_calls(processes: list[Process]) -> list[str]:
    """A line for all groups in which no rank has called anything, folded; or none."""
    groups = [group for each in processes for group in each.groups]
    used = {group.title for group in groups if group.is_used}
    unused = [title for title in dict.fromkeys(each.title for each in groups) if title not in used]
    return _terminal.folded(f"groups without calls: {', '.join(unused)}") if unused else []


def by_title(processes: list[Process]) -> dict[str, Members]:
    """The groups, by title; a number follows that of groups that have the title of another one."""
    found: dict[str, dict[str, Members]] = {}
    for process in processes:
        for group in process.groups:
            by_context = found.setdefault(group.title, {})
            by_context.setdefault(group.context, {})[group.rank] = (process, group)
    return {
        f"{title} ({number})" if number > 1 else title: members
        for title, by_context in found.items()
        for number, members in enumerate(by_context.values(), 1)
    }


def analyse(processes: list[Process]) -> Iterator[Finding]:
    """Yields what differs between the processes of a world, what is missing, and what failed."""
    by_rank = {each.rank: each for each in processes}
    for name, members in by_title(processes).items():
        found = [*_first_difference(name, members, by_rank), *_open_messages(name, members)]
        absent = _without_trace(name, members)
        failures = _failures(name, members)
        if found or failures:
            yield from found
            yield from absent
        yield from failures


def _first_difference(
    name: str, members: Members, by_rank: dict[int, Process]
) -> Iterator[Finding]:
    """The first collective that not all ranks did alike; what follows it means nothing."""
    calls = {
        rank: {each.sequence: each for each in group.collectives()}
        for rank, (_, group) in members.items()
    }
    # From where on all remember; a rank that has called nothing remembers everything.
    first = max((min(each) for each in calls.values() if each), default=0)
    last = max((max(each) for each in calls.values() if each), default=-1)
    for sequence in range(first, last + 1):
        here = {rank: each[sequence] for rank, each in calls.items() if sequence in each}
        if not here:
            continue
        if different := _difference(name, sequence, here, members):
            yield different
            return
        if len(here) < len(members) or any(each.state != "done" for each in here.values()):
            yield _stuck(name, sequence, here, members, by_rank)
            return


def _difference(name: str, sequence: int, here: Calls, members: Members) -> Finding | None:
    said = Counter(signature(each) for each in here.values())
    if len(said) == 1:
        return None
    usual, often = said.most_common(1)[0]
    # With as many on one side as on the other there is no usual one.
    tied = list(said.values()).count(often) > 1
    odd = [rank for rank, each in here.items() if tied or signature(each) != usual]
    lines = [f"group {name}, call #{sequence}: the ranks were called differently"]
    for text, _ in said.most_common():
        ranks = [rank for rank, each in here.items() if signature(each) == text]
        lines.append(f"  rank {_numbers(ranks, members)}: {text}{_at(here[r] for r in ranks)}")
    return Finding("differs", name, "\n".join(lines), sequence, _globals(odd, members))


def _at(operations: Iterable[Operation]) -> str:
    sites = sorted({each.site for each in operations} - {""})
    return f", at {', '.join(sites)}" if sites else ""


def signature(operation: Operation) -> str:
    """Also the sizes of single ranks, where all know them: they have to agree about each."""
    sizes = f" sizes#{operation.layout & 0xFFFF:04x}" if operation.layout else ""
    return operation.describe() + sizes


def _stuck(
    name: str, sequence: int, here: Calls, members: Members, by_rank: dict[int, Process]
) -> Finding:
    """A call that is not over, or that some ranks have not called."""
    waiting = {rank: each for rank, each in here.items() if each.state != "done"}
    ends = {rank: each.ended or members[rank][0].taken for rank, each in waiting.items()}
    waited = max((ends[rank] - each.enqueued for rank, each in waiting.items()), default=0.0)
    _, group = next(iter(members.values()))
    blamed = sorted(rank for rank in members if rank not in here)
    kind = "absent" if blamed else "unfinished"
    if not blamed:
        seen = {rank for index in waiting for rank in members[index][1].waits_for}
        blamed = sorted(seen - here.keys())
    blamed = blamed or [rank for rank in range(group.ranks) if rank not in members]
    came = waiting or here
    state = f"has waited {show_seconds(waited)}" if waiting else "is over"
    text = f"group {name}: {next(iter(came.values())).call()} {state} on rank "
    lines = [text + _numbers(list(came), members) + _at(came.values())]
    numbers = {rank: group.to_global(rank) for rank in blamed}
    for rank, number in numbers.items():
        lines.append(f"  rank {number} {absence(rank, members, by_rank.get(number))}")
    if not blamed:
        lines.append("  all ranks have called it")
    return Finding(kind, name, "\n".join(lines), sequence, [*numbers.values()], waited)


def absence(rank: int, members: Members, there: Process | None = None) -> str:
    """Why a rank is missing; `there` is a process that has its number, and not the group."""
    if rank not in members and there is not None:
        return f"(pid {there.pid}) has left the group, or has not made it yet"
    if rank not in members:
        return "is not among these processes: it is on another host, or has ended"
    process, group = members[rank]
    state = NOT_RUNNING.get(process.state)
    text = f"(pid {process.pid}) has not called it" + (f": it is {state}" if state else "")
    busy = [(each, current) for each in process.groups if (current := each.busy_with())]
    last = group.last()
    if busy:
        other, operation = busy[0]
        text += f"; it is in {operation.call()} of group {other.title}"
    elif last is not None:
        ago = show_seconds(process.taken - (last.ended or last.enqueued))
        text += f"; its last was {last.call()}, {ago} ago"
    else:
        text += "; it has called nothing yet"
    runs = process.state and not state
    return f"{text} (its Python: py-spy dump --pid {process.pid})" if runs else text


def _open_messages(name: str, members: Members) -> Iterator[Finding]:
    for process, group in members.values():
        # Failed: it was still waited for when the group died.
        for operation in group.operations:
            if not operation.is_message or operation.state == "done":
                continue
            waited = (operation.ended or process.taken) - operation.enqueued
            other = [] if operation.peer < 0 else [group.to_global(operation.peer)]
            peer = f"rank {other[0]}" if other else "any rank"
            way = "to" if operation.kind == "send" else "from"
            yield Finding(
                "message",
                name,
                f"group {name}: rank {process.rank} has waited {show_seconds(waited)} in "
                f"{operation.kind} {way} {peer} with tag {operation.tag}",
                operation.sequence,
                other,
                waited,
            )


def _without_trace(name: str, members: Members) -> Iterator[Finding]:
    _, group = next(iter(members.values()))
    gone = [group.to_global(rank) for rank in range(group.ranks) if rank not in members]
    if gone:
        text = f"group {name}: no trace of rank {', '.join(map(str, gone))}: it had died, or could "
        yield Finding("no trace", name, f"{text}not write", ranks=gone)


def _failures(name: str, members: Members) -> list[Finding]:
    """The errors of the ranks, most of which are equal."""
    said: dict[str, list[int]] = {}
    for process, group in members.values():
        if group.failure:
            said.setdefault(group.failure, []).append(process.rank)
    return [
        Finding("failed", name, f"rank {', '.join(map(str, ranks))} raised: {text}", ranks=[])
        for text, ranks in said.items()
    ]


def _globals(ranks: list[int], members: Members) -> list[int]:
    return [members[rank][0].rank for rank in ranks]


def _numbers(ranks: list[int], members: Members) -> str:
    return ", ".join(map(str, _globals(ranks, members)))
