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

from mycoll import _terminal, black_box, status, timeline
from mycoll._units import show_seconds
from mycoll.black_box import Members, Operation, Process, default_folder, load_all

Calls = dict[int, Operation]  # by rank in the group


@dataclass
class Finding:
    """Something that is not as it should be, in one group."""

    kind: str  # "differs", "absent", "no trace", "unfinished", "message", "failed"
    group: str  # its title
    text: str
    sequence: int = -1
    ranks: list[int] = field(default_factory=list)  # of the job: those to look at


def main(words: Sequence[str]) -> int:
    """Runs `mycoll trace` with these words; returns the exit code."""
    parser = _terminal.Parser(
        prog="mycoll trace",
        description="Compares what the ranks did last: which is missing, differs, or waits.",
    )
    text = f"files, or folders of them (default: the latest job in {default_folder()})"
    parser.add_argument("trace", nargs="*", type=Path, help=text)
    parser.add_argument("--live", action="store_true", help="the processes that run here, instead")
    parser.add_argument("--job", default="", help="with --live: only this job")
    text = "write a Chrome trace, for https://ui.perfetto.dev"
    parser.add_argument("--export", type=Path, metavar="FILE.json", help=text)
    parser.add_argument("--json", action="store_true", help="for programs")
    parsed = parser.parse_args(list(words))
    if parsed.live and parsed.trace:
        parser.error("--live compares processes that run; name no traces with it")
    if parsed.export and parsed.export.suffix != ".json":
        parser.error("--export writes JSON: give it a name that ends with .json")
    problems: list[str] = []
    if parsed.live:
        found = black_box.find(job=parsed.job)
        if not found:
            problems.append(status.NOT_THOSE if parsed.job else status.NOBODY)
    elif parsed.trace or default_folder().is_dir():
        found, problems = load_all(parsed.trace or [default_folder()])
    else:
        found = []
        problems.append(f"no traces in {default_folder()}, where groups that fail leave them")
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
    lines += [*status.without_calls(processes), ""]
    lines += [line for each in results for line in each.text.splitlines()]
    if not results:
        lines.append("no difference in what they remember, and nothing waits")
    return "\n".join(part for line in lines for part in _terminal.folded(line) or [""])


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
    for name, members in by_title(processes).items():
        found = [*_first_difference(name, members), *_open_messages(name, members)]
        absent = _without_trace(name, members)
        failures = _failures(name, members)
        if found or failures:
            yield from found
            yield from absent
        yield from failures


def _first_difference(name: str, members: Members) -> Iterator[Finding]:
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
        absent = [rank for rank in members if rank not in here]
        if here and (different := _difference(name, sequence, here, members)):
            yield different
            return
        if here and absent:
            yield _absence(name, sequence, here, absent, members)
            return
        if waiting := {rank: op for rank, op in here.items() if op.state != "done"}:
            yield _unfinished(name, sequence, here, waiting, members)
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


def _absence(name: str, sequence: int, here: Calls, absent: list[int], members: Members) -> Finding:
    some = next(iter(here.values()))
    lines = [
        f"group {name}, call #{sequence}: "
        f"rank {_numbers(list(here), members)} came, rank {_numbers(absent, members)} did not",
        f"  {some.describe()}{_at(here.values())}",
    ]
    for rank in absent:
        process, group = members[rank]
        last = next(reversed(group.collectives()), None)
        if last is None:
            lines.append(f"  rank {process.rank} has called nothing in this group")
        else:
            ago = show_seconds(process.taken - (last.ended or last.enqueued))
            lines.append(f"  rank {process.rank}: its last was {last.call()}, {ago} before")
        for other in process.groups:
            busy = other.busy_with()
            if other is not group and busy is not None:
                lines.append(f"  rank {process.rank} is in {busy.call()} of {other.title}")
    return Finding("absent", name, "\n".join(lines), sequence, _globals(absent, members))


def _unfinished(name: str, sequence: int, here: Calls, waiting: Calls, members: Members) -> Finding:
    some = next(iter(waiting.values()))
    missing = {
        rank
        for index in waiting
        for rank in members[index][1].waits_for
        if rank not in here or here[rank].state == "done"
    }
    _, group = next(iter(members.values()))
    nowhere = [rank for rank in range(group.ranks) if rank not in members]
    blamed = sorted(missing) or nowhere
    text = f"group {name}, call #{sequence}: not over on rank {_numbers(list(waiting), members)}"
    if blamed:
        text += f", waits for rank {', '.join(str(group.to_global(r)) for r in blamed)}"
    text += f"\n  {some.describe()}{_at([some])}"
    return Finding("unfinished", name, text, sequence, [group.to_global(rank) for rank in blamed])


def _open_messages(name: str, members: Members) -> Iterator[Finding]:
    for process, group in members.values():
        # Failed: it was still waited for when the group died.
        for operation in group.operations:
            if not operation.is_message or operation.state == "done":
                continue
            waited = show_seconds((operation.ended or process.taken) - operation.enqueued)
            other = [] if operation.peer < 0 else [group.to_global(operation.peer)]
            peer = f"rank {other[0]}" if other else "any rank"
            way = "to" if operation.kind == "send" else "from"
            yield Finding(
                "message",
                name,
                f"group {name}: rank {process.rank} has waited {waited} in {operation.kind} {way} "
                f"{peer} with tag {operation.tag}",
                operation.sequence,
                other,
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
