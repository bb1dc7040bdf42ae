"""The record that each mycoll process keeps of itself, read from outside, also while it hangs.

Each process keeps its last operations in a memfd (csrc/observe/black_box.h), which its own user
(and root) can open through /proc. Nothing has to answer there. A trace is a copy of it in a file.
The memory describes its own layout, so this reads processes of other versions, too.

status.py, trace.py and metrics.py show what this finds.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAGIC = b"mycollBB"
LINK = "/memfd:mycoll.black_box"
MESSAGES = ("send", "recv", "put", "signal", "wait_signal")


@dataclass
class Operation:
    """One call. Times are seconds since 1970; None: not yet, or not known."""

    kind: str
    sequence: int
    state: str  # queued, started, done, failed
    enqueued: float
    started: float | None
    ended: float | None
    dtype: str = ""
    reduce_op: str = ""
    peer: int = -1  # root; of a message the other rank of the group, -1: any
    tag: int = 0
    bytes: int = 0  # of the part that all ranks know alike; 0 where sizes differ by rank
    layout: int = 0  # hash of the sizes of all ranks, where they all know them
    in_bytes: int = 0  # of this rank
    out_bytes: int = 0
    element_bytes: int = 1  # 0: not known
    site: str = ""  # "train.py:57 in step"
    function: str = ""  # the same, in parts
    file: str = ""
    line: int = 0
    id: int = 0  # counts the calls of the process
    on_device: bool = False
    composite: bool = False

    @property
    def is_message(self) -> bool:
        return self.kind in MESSAGES

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "failed")

    def describe(self) -> str:
        """As the engine's messages do: what all ranks have to agree about."""
        words = [self.kind, self.reduce_op]
        if self.is_message:
            way = "to" if self.kind == "send" else "from"
            words.append(f"{way} {'any rank' if self.peer < 0 else f'rank {self.peer}'}")
        if "barrier" not in self.kind and not self.composite:
            words.append(self.dtype)
            if self.kind not in ("gather", "scatter", "all_to_all"):
                size = self.element_bytes
                words.append(f"numel={self.bytes // size}" if size else f"bytes={self.bytes}")
        if self.is_message:
            words.append(f"tag={self.tag}" if self.tag else "")
        elif self.peer >= 0:
            words.append(f"root={self.peer}")
        return " ".join(filter(None, words))


@dataclass
class Counts:
    """Totals of the operations of one kind."""

    done: int
    failed: int
    bytes: int  # the larger of input and output, added up
    seconds: float  # from call to end, added up


@dataclass
class Group:
    name: str
    description: str
    context: str  # the same on all ranks, and no other group's
    rank: int
    ranks: int
    global_ranks: list[int]
    phase: str = "open"  # open, failed, closed
    transport: str = ""
    failure: str = ""
    submitted: int = 0  # collectives called
    finished: int = 0
    waits_for: list[int] = field(default_factory=list)  # ranks of the group, as last looked at
    waits_for_more: int = 0  # so many others
    operations: list[Operation] = field(default_factory=list)
    counts: dict[str, Counts] = field(default_factory=dict)  # by kind

    @property
    def title(self) -> str:
        """torch's name of the group, as errors have it, and what its maker says it is for."""
        return f"{self.name} ({self.description})" if self.description else self.name

    @property
    def is_used(self) -> bool:
        return bool(self.submitted or self.operations or self.phase == "failed")

    def to_global(self, rank: int) -> int:
        return self.global_ranks[rank] if 0 <= rank < len(self.global_ranks) else rank

    def collectives(self) -> list[Operation]:
        return [each for each in self.operations if not each.is_message]

    def current(self) -> Operation | None:
        """The oldest collective that is not over."""
        return next((each for each in self.collectives() if not each.is_over), None)

    def open_messages(self) -> list[Operation]:
        return [each for each in self.operations if each.is_message and not each.is_over]

    def last(self) -> Operation | None:
        return self.operations[-1] if self.operations else None


@dataclass
class Process:
    rank: int
    pid: int
    host: str
    job: str
    version: str
    state: str = ""  # as ps shows it: R, S, D, T, t, Z; empty: not known
    taken: float = 0.0  # when this was read
    groups: list[Group] = field(default_factory=list)
    ended: dict[str, Counts] = field(default_factory=dict)  # by kind: of groups that are gone


def find(pids: list[int] | None = None) -> list[Process]:
    """The mycoll processes of this user on this host, or those named, by job and rank."""
    found = [process for pid in pids or own_pids() if (process := read(pid)) is not None]
    return sorted(found, key=lambda each: (each.job, each.rank, each.pid))


def own_pids() -> list[int]:
    """The ids of all processes of this user on this host."""
    me = os.geteuid()
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == me:
                pids.append(int(entry.name))
    return pids


def memfds(pid: int) -> Iterator[Path]:
    """The process's descriptors of such memory."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(path.readlink()).startswith(LINK):
                yield path


def related(processes: list[Process]) -> list[list[Process]]:
    """Sorted by world: those that have a group in common, or had their first one (which is what a
    job is called after), stay together, if by way of others."""
    worlds: list[tuple[set[str], list[Process]]] = []
    for process in processes:
        contexts = {each.context for each in process.groups} | {process.job or str(process.pid)}
        members = [process]
        apart = []
        for world in worlds:
            if world[0] & contexts:
                contexts, members = contexts | world[0], [*world[1], *members]
            else:
                apart.append(world)
        worlds = [*apart, (contexts, members)]
    order = {id(process): index for index, process in enumerate(processes)}
    for _, members in worlds:
        members.sort(key=lambda each: order[id(each)])
    return sorted((members for _, members in worlds), key=lambda members: order[id(members[0])])


def read(pid: int) -> Process | None:
    """None when there is no such process, it is another user's, or it has made no group."""
    # The process runs meanwhile, and may have a version that is unknown here.
    with contextlib.suppress(OSError, *_MALFORMED):
        for path in memfds(pid):
            with contextlib.suppress(OSError):
                with path.open("rb", buffering=0) as file:
                    data = file.read()
                    again = os.pread(file.fileno(), len(data), 0)
                process = _to_process(data, again)
                # A child of fork inherits its parent's descriptor, which describes the parent.
                if process.pid in numbers_of(pid):
                    process.pid, process.state = pid, _state_of(pid)
                    return process
    return None


def load(path: Path) -> Process:
    """A trace. Raises TraceError when it is none."""
    try:
        data = path.read_bytes()
        return _to_process(data, data)
    except (OSError, *_MALFORMED) as error:
        raise TraceError(f"{path} is not a trace: {error}") from error


class TraceError(ValueError):
    """A file that is no trace; the message says which, and why."""


_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, struct.error, RecursionError)


class _Struct:
    """A structure of the box: named fields at offsets. They are unpacked in one call, as a box with
    many groups has ten thousands of entries."""

    def __init__(self, description: dict[str, Any]) -> None:
        self.fields = {name: (at, f"<{kind}") for name, (at, kind) in description.items()}
        self.slices: list[tuple[str, slice, bool]] = []
        whole, end, count = "<", 0, 0
        for name, (at, kind) in sorted(self.fields.items(), key=lambda each: each[1][0]):
            whole += f"{at - end}x{kind[1:]}"
            values = 1 if kind.endswith("s") else int(kind[1:-1] or 1)
            self.slices.append((name, slice(count, count + values), kind.endswith("s")))
            end, count = at + struct.calcsize(kind), count + values
        self.whole = struct.Struct(whole)

    def read(self, data: bytes, base: int) -> dict[str, Any]:
        found = self.whole.unpack_from(data, base)
        values: dict[str, Any] = {}
        for name, where, is_text in self.slices:
            value = found[where]
            if is_text:
                values[name] = value[0].split(b"\0", 1)[0].decode(errors="replace")
            else:
                values[name] = list(value) if len(value) > 1 else value[0]
        return values


def _to_process(data: bytes, again: bytes) -> Process:
    """again: the same, read a moment later; an operation that differs was being written over."""
    if data[:8] != MAGIC:
        raise ValueError("it does not begin as one")
    (length,) = struct.unpack_from("<I", data, 12)
    layout = json.loads(data[16 : 16 + length])
    box = _Struct(layout["box"]["fields"]).read(data, layout["box"]["at"])
    process = Process(
        rank=box["rank"],
        pid=box["pid"],
        host=box["host"],
        job=f"{box['job']:016x}",
        version=box["version"],
        # A copy says when it was made.
        taken=((box["copied"] if data is again else 0) or time.monotonic_ns()) / 1e9
        + box["realtimeOffset"] / 1e9,
        ended=_counts(layout, box["ended"]),
    )
    groups = layout["groups"]
    of_groups, of_entries = _Struct(groups["fields"]), _Struct(layout["entries"]["fields"])
    for index in range(box["groups"]):
        at = groups["at"] + index * groups["bytes"]
        if at + groups["bytes"] > len(data):
            break
        state = of_groups.read(data, at)
        if layout["phases"][state["phase"]] not in ("unused", "closed"):
            group = _to_group(layout, box, data, again, at, state, of_entries)
            if group.operations or not state["isPart"]:
                process.groups.append(group)
    process.groups.sort(key=lambda each: each.name)
    return process


def _to_group(
    layout: dict[str, Any],
    box: dict[str, Any],
    data: bytes,
    again: bytes,
    at: int,
    state: dict[str, Any],
    reader: _Struct,
) -> Group:
    group = Group(
        name=state["name"],
        description=state["description"],
        context=f"{state['context']:016x}",
        rank=state["rank"],
        ranks=state["ranks"],
        global_ranks=[each for each in state["globalRanks"][: state["ranks"]] if each >= 0],
        phase=layout["phases"][state["phase"]],
        transport=state["transport"],
        failure=state["failure"],
        submitted=state["submitted"],
        finished=state["finished"],
        counts=_counts(layout, state["tallies"]),
    )
    if state["waitSequence"] == group.finished < group.submitted and not state["waitVersion"] % 2:
        count = max(0, state["waitCount"])
        group.waits_for = state["waitRanks"][:count]
        group.waits_for_more = max(0, count - len(group.waits_for))
    entries = layout["entries"]
    first = at + entries["at"]
    id_at, id_kind = reader.fields["id"]
    rows = []
    for slot in range(state["capacity"]):
        base = first + slot * entries["bytes"]
        (number,) = struct.unpack_from(id_kind, data, base + id_at)
        (later,) = struct.unpack_from(id_kind, again, base + id_at)
        if number and number == later:  # else it was being written over
            rows.append(reader.read(data, base))
    rows.sort(key=lambda row: row["id"])
    group.operations = [_to_operation(layout, box, data, row) for row in rows]
    return group


def _counts(layout: dict[str, Any], tallies: list[int]) -> dict[str, Counts]:
    found = {}
    for index, kind in enumerate(layout["operations"]):
        done, failed, bytes_, nanos = tallies[4 * index : 4 * index + 4]
        if done or failed:
            found[kind] = Counts(done, failed, bytes_, nanos / 1e9)
    return found


def _to_operation(
    layout: dict[str, Any], box: dict[str, Any], data: bytes, row: dict[str, Any]
) -> Operation:
    def moment(nanos: int) -> float | None:
        return (nanos + box["realtimeOffset"]) / 1e9 if nanos else None

    def named(names: list[str], index: int, other: str = "") -> str:
        return names[index] if index < len(names) else other

    flags = {name for bit, name in enumerate(layout["flags"]) if row["flags"] >> bit & 1}
    function = file = line = ""
    if row["site"]:
        start = layout["sites"]["at"] + row["site"] * layout["sites"]["bytes"]
        text = data[start : start + layout["sites"]["bytes"]].split(b"\0", 1)[0]
        function, file, line = text.decode(errors="replace").split("\n")
    kind = layout["operations"][row["kind"]]
    dtype = named(layout["dtypes"], row["dtype"], f"dtype#{row['opaqueType']}")
    is_known = row["dtype"] < len(layout["dtypes"])
    scaled = "PREMUL_" if is_known and row["opaqueType"] else ""
    reduce_op = named(layout["reduce_ops"], row["reduceOp"])
    return Operation(
        kind=kind,
        sequence=row["sequence"],
        state=layout["states"][row["state"]],
        enqueued=moment(row["enqueued"]) or 0.0,
        started=moment(row["started"]),
        ended=moment(row["ended"]),
        dtype=dtype,
        reduce_op=reduce_op and scaled + reduce_op,
        peer=row["peer"] if kind in MESSAGES else row["root"],
        tag=row["tag"],
        bytes=row["bytes"],
        layout=row["layout"],
        in_bytes=row["inBytes"],
        out_bytes=row["outBytes"],
        element_bytes=layout["element_bytes"][row["dtype"]] if is_known else 0,
        site=f"{Path(file).name}:{line} in {function}" if file else "",
        function=function,
        file=file,
        line=int(line or 0),
        id=row["id"],
        on_device="device" in flags,
        composite="composite" in flags,
    )


def numbers_of(pid: int) -> Iterator[int]:
    """The ids of the process in its own and all outer pid namespaces."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            yield from map(int, line.split()[1:])
    yield pid


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
