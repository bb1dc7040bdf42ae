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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAGIC = b"mycollBB"
LINK = "/memfd:mycoll.black_box"
NOBODY = "no mycoll processes of this user on this host"
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
    id: int = 0  # counts the calls of the process
    on_device: bool = False
    composite: bool = False

    @property
    def is_message(self) -> bool:
        """Whether it is between two ranks."""
        return self.kind in MESSAGES

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return self.state in ("done", "failed")

    def call(self) -> str:
        """Its description with the number of a collective, as in "all_reduce #3 SUM float32"."""
        name, *more = self.describe().split(" ", 1)
        number = "" if self.is_message else f" #{self.sequence}"
        return f"{name}{number} {' '.join(more)}".rstrip()

    def describe(self) -> str:
        """The parts that all ranks have to agree about, in the words of the engine's messages."""
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
    """A group, as one of its ranks sees it."""

    name: str
    description: str
    context: str  # the same on all ranks, and no other group's
    rank: int
    ranks: int
    global_ranks: list[int]
    phase: str = "open"  # open, failed, closed
    transport: str = ""
    encryption: str = ""  # of bytes between hosts, once anything was called
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
        """Whether anything was called in it."""
        return bool(self.submitted or self.operations or self.phase == "failed")

    def to_global(self, rank: int) -> int:
        """The rank in the job of a rank of the group."""
        return self.global_ranks[rank] if 0 <= rank < len(self.global_ranks) else rank

    def collectives(self) -> list[Operation]:
        """The operations but messages, from old to new."""
        return [each for each in self.operations if not each.is_message]

    def current(self) -> Operation | None:
        """The oldest collective that is not over."""
        return next((each for each in self.collectives() if not each.is_over), None)

    def busy_with(self) -> Operation | None:
        """The collective that the rank is in, or else the message."""
        return self.current() or next((each for each in self.operations if not each.is_over), None)

    def last(self) -> Operation | None:
        """The newest operation."""
        return self.operations[-1] if self.operations else None


@dataclass
class Process:
    """A process, and the groups that it is in."""

    rank: int
    pid: int
    host: str
    job: str
    version: str
    state: str = ""  # as ps shows it: R, S, D, T, t, Z; empty: not known
    taken: float = 0.0  # when this was read
    groups: list[Group] = field(default_factory=list)
    ended: dict[str, Counts] = field(default_factory=dict)  # by kind: of groups that are gone


Members = dict[int, tuple[Process, Group]]  # of a group, by their rank in it


def find(pids: list[int] | None = None, job: str = "") -> list[Process]:
    """Reads the mycoll processes of this user on this host.

    Args:
        pids: Only these; all if it is empty.
        job: Only those of this job; its beginning is enough.

    Returns:
        The processes, by job and rank.
    """
    me, running = os.geteuid(), []
    for entry in Path("/proc").iterdir() if not pids else ():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == me:
                running.append(int(entry.name))
    found = [process for pid in pids or running if (process := read(pid)) is not None]
    chosen = [each for each in found if each.job.startswith(job)]
    return sorted(chosen, key=lambda each: (each.job, each.rank, each.pid))


def related(processes: list[Process]) -> list[list[Process]]:
    """The processes by world, in their order. Those that have a group in common, or had their first
    one (a job has its name), are in one world, also by way of others."""
    worlds: list[tuple[set[str], list[int]]] = []
    for index, process in enumerate(processes):
        contexts = {each.context for each in process.groups} | {process.job or str(process.pid)}
        joined = [world for world in worlds if world[0] & contexts]
        worlds = [world for world in worlds if world not in joined]
        indices = sorted([*(each for _, members in joined for each in members), index])
        worlds.append((contexts.union(*(names for names, _ in joined)), indices))
    worlds.sort(key=lambda world: world[1])
    return [[processes[index] for index in members] for _, members in worlds]


def read(pid: int) -> Process | None:
    """Reads a process; None if there is no such one, it is another user's, or has made no group."""
    # The process runs meanwhile, and may have a version that is unknown here.
    with contextlib.suppress(OSError, *_MALFORMED):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if not str(path.readlink()).startswith(LINK):
                    continue
                with path.open("rb", buffering=0) as file:
                    before = file.read()
                    data, after = (os.pread(file.fileno(), len(before), 0) for _ in range(2))
                process = _Box(data, before, after).process()
                # A child of fork inherits its parent's descriptor, which describes the parent. The
                # process has a number in its own and in each outer pid namespace.
                status = Path(f"/proc/{pid}/status").read_text()
                _, _, numbers = status.partition("\nNSpid:")
                if str(process.pid) in [str(pid), *numbers.partition("\n")[0].split()]:
                    stat = Path(f"/proc/{pid}/stat").read_text()
                    process.pid, process.state = pid, stat.rsplit(")", 1)[1].split()[0]
                    return process
    return None


def load(path: Path) -> Process:
    """Reads a trace.

    Raises:
        ValueError: The file is none; the message says which, and why.
    """
    try:
        return _Box(path.read_bytes()).process()
    except (OSError, *_MALFORMED) as error:
        raise ValueError(f"{path} is not a trace: {error}") from error


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
            first, *more = found[where]
            text = first.split(b"\0", 1)[0].decode(errors="replace") if is_text else first
            values[name] = [first, *more] if more else text
        return values


class _Box:
    """The memory of a process. It is read before and after, too: what is the same in both did not
    change meanwhile. (In one reading, the processor may read a number after what it guards.)"""

    def __init__(self, data: bytes, *others: bytes) -> None:
        if data[:8] != MAGIC:
            raise ValueError("it does not begin as one")
        (length,) = struct.unpack_from("<I", data, 12)
        self.data, self.others = data, others
        self.layout = layout = json.loads(data[16 : 16 + length])
        self.groups = _Struct(layout["groups"]["fields"])
        self.entries = _Struct(layout["entries"]["fields"])
        self.fields = _Struct(layout["box"]["fields"]).read(data, layout["box"]["at"])
        self.offset = self.fields["realtimeOffset"]

    def process(self) -> Process:
        fields, groups = self.fields, self.layout["groups"]
        # A copy says when it was made.
        copied = 0 if self.others else fields["copied"]
        process = Process(
            job=f"{fields['job']:016x}",
            taken=((copied or time.monotonic_ns()) + self.offset) / 1e9,
            ended=self._counts(fields["ended"]),
            **{name: fields[name] for name in ("rank", "pid", "host", "version")},
        )
        for index in range(fields["groups"]):
            at = groups["at"] + index * groups["bytes"]
            if at + groups["bytes"] > len(self.data):
                break
            state = self.groups.read(self.data, at)
            if self.layout["phases"][state["phase"]] not in ("unused", "closed"):
                group = self._group(at, state)
                if group.operations or not state["isPart"]:
                    process.groups.append(group)
        process.groups.sort(key=lambda each: each.name)
        return process

    def _group(self, at: int, state: dict[str, Any]) -> Group:
        alike = ("name", "description", "rank", "ranks", "transport", "failure")
        group = Group(
            context=f"{state['context']:016x}",
            global_ranks=[each for each in state["globalRanks"][: state["ranks"]] if each >= 0],
            phase=self.layout["phases"][state["phase"]],
            submitted=state["submitted"],
            finished=state["finished"],
            counts=self._counts(state["tallies"]),
            encryption=state.get("encryption", ""),  # older processes have none
            **{name: state[name] for name in alike},
        )
        is_stable = state["waitVersion"] % 2 == 0 and self._is_same(self.groups, "waitVersion", at)
        if state["waitSequence"] == group.finished < group.submitted and is_stable:
            count = max(0, state["waitCount"])
            group.waits_for = state["waitRanks"][:count]
            group.waits_for_more = max(0, count - len(group.waits_for))
        entries = self.layout["entries"]
        id_at, id_kind = self.entries.fields["id"]
        rows = []
        for slot in range(state["capacity"]):
            base = at + entries["at"] + slot * entries["bytes"]
            (number,) = struct.unpack_from(id_kind, self.data, base + id_at)
            if number and self._is_same(self.entries, "id", base):  # else it was being written over
                rows.append(self.entries.read(self.data, base))
        rows.sort(key=lambda row: row["id"])
        group.operations = [self._operation(row) for row in rows]
        return group

    def _is_same(self, kind: _Struct, name: str, base: int) -> bool:
        """Whether a field was the same before and after."""
        at, letters = kind.fields[name]
        begin, end = base + at, base + at + struct.calcsize(letters)
        return all(other[begin:end] == self.data[begin:end] for other in self.others)

    def _counts(self, tallies: list[int]) -> dict[str, Counts]:
        found = {}
        for index, kind in enumerate(self.layout["operations"]):
            done, failed, bytes_, nanos = tallies[4 * index : 4 * index + 4]
            if done or failed:
                found[kind] = Counts(done, failed, bytes_, nanos / 1e9)
        return found

    def _operation(self, row: dict[str, Any]) -> Operation:
        layout = self.layout
        flags = {name for bit, name in enumerate(layout["flags"]) if row["flags"] >> bit & 1}
        sites = layout["sites"]
        begin = sites["at"] + row["site"] * sites["bytes"]
        site = self.data[begin : begin + sites["bytes"]] if row["site"] else b"\n\n"
        function, file, line = site.split(b"\0", 1)[0].decode(errors="replace").split("\n")
        kind = layout["operations"][row["kind"]]
        types, reductions = layout["dtypes"], layout["reduce_ops"]
        is_known = row["dtype"] < len(types)
        scaled = "PREMUL_" if is_known and row["opaqueType"] else ""
        has_op = row["reduceOp"] < len(reductions) and reductions[row["reduceOp"]]
        alike = ("sequence", "tag", "bytes", "layout", "id")
        return Operation(
            kind=kind,
            state=layout["states"][row["state"]],
            enqueued=self._moment(row["enqueued"]) or 0.0,
            started=self._moment(row["started"]),
            ended=self._moment(row["ended"]),
            dtype=types[row["dtype"]] if is_known else f"dtype#{row['opaqueType']}",
            reduce_op=scaled + reductions[row["reduceOp"]] if has_op else "",
            peer=row["peer"] if kind in MESSAGES else row["root"],
            in_bytes=row["inBytes"],
            out_bytes=row["outBytes"],
            element_bytes=layout["element_bytes"][row["dtype"]] if is_known else 0,
            site=f"{Path(file).name}:{line} in {function}" if file else "",
            on_device="device" in flags,
            composite="composite" in flags,
            **{name: row[name] for name in alike},
        )

    def _moment(self, nanos: int) -> float | None:
        return (nanos + self.offset) / 1e9 if nanos else None


# --- traces ---------------------------------------------------------------------------------------


def default_folder() -> Path:
    """The folder in which processes write traces by default, in a folder for each job."""
    return Path(f"/tmp/mycoll-{os.geteuid()}")


def load_all(paths: list[Path]) -> tuple[list[Process], list[str]]:
    """Reads traces: files, folders with a file for each rank, or folders of such folders, of which
    the latest is taken.

    Returns:
        The processes, by rank; and a line for each path or file that could not be read.
    """
    processes: list[Process] = []
    problems: list[str] = []
    for path in paths:
        try:
            files = _traces_below(path) if path.is_dir() else [path] if path.exists() else []
        except OSError as error:
            problems.append(f"{path} cannot be read: {error}")
            continue
        if not files:
            problems.append(f"no traces in {path}")
        for file in files:
            try:
                processes.append(load(file))
            except ValueError as error:
                problems.append(str(error))
    return sorted(processes, key=lambda each: each.rank), problems


def _traces_below(folder: Path) -> list[Path]:
    if traces := _traces_in(folder):
        # A file with a trace's name that is none is reported, others are not.
        return sorted({*traces, *(file for file in folder.glob("rank_*") if file.is_file())})
    jobs = [found for each in folder.iterdir() if each.is_dir() and (found := _traces_in(each))]
    return max(jobs, key=lambda job: max(each.stat().st_mtime for each in job), default=[])


def _traces_in(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.glob("*")):
        with contextlib.suppress(OSError):
            if path.is_file():
                with path.open("rb") as file:
                    found += [path] if file.read(len(MAGIC)) == MAGIC else []
    return found
