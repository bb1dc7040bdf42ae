"""The collectives: their buffers, the call in torch's words, and what must come out."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from mycoll.bench.arena import Arena, aligned
from mycoll.bench.patterns import Pattern, poison, spoil
from mycoll.bench.workload import Call, Case, Group, Unsupported, Workload, now
from mycoll.bench.world import World

_LATE_SECONDS = 0.01

# torch 2.13 renamed these two; the old names warn at every call.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_REDOPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}


@dataclass(frozen=True)
class Setting:
    """One set of buffers of a case; `target` is `source` where torch works in place."""

    source: torch.Tensor
    target: torch.Tensor
    world: World
    group: Group
    redop: dist.ReduceOp | dist.ReduceOp.RedOpType
    root: int

    def at_root(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """The parts of a tensor, by rank; None on other ranks than the root."""
        return list(tensor.chunk(self.world.size)) if self.world.rank == self.root else None


@dataclass(frozen=True)
class Collective:
    """`source` and `target`: parts of S, the size in the table: "all" is S, "part" is S / ranks.

    `bus` turns algbw into busbw. `traffic` is how many bytes per byte of S the ranks together must
    at least move through memory.
    """

    source: str
    target: str
    bus: Callable[[int], float]
    traffic: Callable[[int], float]


def _sendrecv(io: Setting) -> Call:
    """Every rank sends to the next one and receives from the one before."""
    world, group = io.world, io.group
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    if world.device.type != "cpu":
        operations = [
            dist.P2POp(dist.isend, io.source, following, group),
            dist.P2POp(dist.irecv, io.target, previous, group),
        ]
        return lambda: [work.wait() for work in dist.batch_isend_irecv(operations)]

    def exchange() -> None:
        receiving = dist.irecv(io.target, previous, group=group)
        sending = dist.isend(io.source, following, group=group)
        assert receiving is not None and sending is not None
        sending.wait()
        receiving.wait()

    return exchange


def _wrong(op: str, io: Setting, pattern: Pattern) -> int:
    """Counts the elements of the target that a collective has computed wrongly."""
    rank, elements = io.world.rank, io.target.numel()
    if op in ("gather", "reduce") and rank != io.root:
        return 0
    if op in ("all_reduce", "reduce"):
        return pattern.wrong_reduced(io.target, 0)
    if op == "reduce_scatter":
        return pattern.wrong_reduced(io.target, rank * elements)
    if op in ("broadcast", "scatter"):
        return pattern.wrong_copy(io.target, io.root, rank * elements if op == "scatter" else 0)
    if op == "sendrecv":
        return pattern.wrong_copy(io.target, (rank - 1) % io.world.size)
    parts = io.target.chunk(io.world.size)
    offset = rank * parts[0].numel() if op == "all_to_all" else 0
    return sum(pattern.wrong_copy(part, source, offset) for source, part in enumerate(parts))


_ONE, _OTHERS = (lambda p: 1.0), (lambda p: (p - 1) / p)
_CALLS: dict[str, Callable[[Setting], Callable[..., object]]] = {
    "all_reduce": lambda io: partial(dist.all_reduce, io.source, op=io.redop),
    "broadcast": lambda io: partial(dist.broadcast, io.source, src=io.root),
    "reduce": lambda io: partial(dist.reduce, io.source, dst=io.root, op=io.redop),
    "all_gather": lambda io: partial(_all_gather, io.target, io.source),
    "reduce_scatter": lambda io: partial(_reduce_scatter, io.target, io.source, op=io.redop),
    "all_to_all": lambda io: partial(dist.all_to_all_single, io.target, io.source),
    "gather": lambda io: partial(dist.gather, io.source, io.at_root(io.target), dst=io.root),
    "scatter": lambda io: partial(dist.scatter, io.target, io.at_root(io.source), src=io.root),
}
COLLECTIVES = {
    "all_reduce": Collective("all", "source", lambda p: 2 * (p - 1) / p, lambda p: 2 * p),
    "broadcast": Collective("all", "source", _ONE, lambda p: p),
    "reduce": Collective("all", "source", _ONE, lambda p: p + 1),
    "all_gather": Collective("part", "all", _OTHERS, lambda p: p + 1),
    "reduce_scatter": Collective("all", "part", _OTHERS, lambda p: p + 1),
    "all_to_all": Collective("all", "all", _OTHERS, lambda p: 2 * p),
    "gather": Collective("part", "all", _OTHERS, lambda p: 2),
    "scatter": Collective("all", "part", _OTHERS, lambda p: 2),
    "sendrecv": Collective("all", "all", _ONE, lambda p: 2 * p),
}


def _bind(op: str, io: Setting) -> Call:
    """The call of a collective on these buffers."""
    return _sendrecv(io) if op == "sendrecv" else partial(_CALLS[op](io), group=io.group)


def _call_operator(name: str, io: Setting) -> Call:
    operator = getattr(torch.ops.mycoll, name).default
    return partial(operator, io.source, io.group.group_name)


# mycoll's. They return their results, but for the first.
_OPERATORS = {"all_reduce": "all_reduce_"} | {op: op for op in ("all_gather", "reduce_scatter")}


class CollectiveWorkload(Workload):
    """A collective of torch.distributed, on windows of one arena."""

    def __init__(self, case: Case, world: World, hot: bool) -> None:
        super().__init__(case, world)
        self._kind = kind = COLLECTIVES[case.op]
        self._bind: Callable[[Setting], Call] = partial(_bind, case.op)
        if case.op == "sendrecv" and world.size < 2:
            raise Unsupported("sendrecv needs two ranks")
        whole = max(1, case.size // case.dtype.itemsize)
        parted = "part" in (kind.source, kind.target) or case.op == "all_to_all"
        if parted:
            whole = max(1, whole // world.size) * world.size
        self.size: int = whole * case.dtype.itemsize
        self.count: int = whole // world.size if parted else whole
        self.bus_factor: float = kind.bus(world.size)
        self.copied_bytes: float = kind.traffic(world.size) * self.size / (2 * world.size)
        self._elements = {"all": whole, "part": whole // world.size, "source": 0}
        self._target_offset = aligned(self._elements[kind.source] * case.dtype.itemsize)
        target_bytes = aligned(self._elements[kind.target] * case.dtype.itemsize)
        self.touched_bytes: int = self._target_offset + target_bytes
        self._arena = Arena(self.touched_bytes, world, hot, self.busy_ranks)

    def refill(self) -> None:
        self._arena.refill(self.case.dtype)

    def calls(self, group: Group) -> Sequence[Call]:
        return [self._bind(self._setting(index, group)) for index in range(self._arena.windows)]

    def with_operators(self) -> Workload:
        """The same with torch.ops.mycoll."""
        if self.case.op not in _OPERATORS or self.case.redop not in ("none", "sum"):
            raise Unsupported("")
        found = copy.copy(self)
        found._bind = partial(_call_operator, _OPERATORS[self.case.op])
        return found

    def verify(self, group: Group, seed: int, plant_error: bool) -> int:
        pattern = Pattern(self.case.dtype, self.case.redop, self.world.size, seed)
        io = self._setting(seed % self._arena.windows, group)
        if self._kind.target != "source":
            poison([io.target])
        pattern.fill(io.source, self.world.rank)
        returned = self._bind(io)()
        if isinstance(returned, torch.Tensor):
            io.target.copy_(returned)
        if self.world.device.type != "cpu":
            torch.accelerator.synchronize(self.world.device)
        if plant_error:
            spoil(io.target)
        wrong = _wrong(self.case.op, io, pattern)
        if self._kind.target != "source":
            # Inputs belong to the caller: an operation that changes them is as wrong.
            wrong += pattern.wrong_copy(io.source, self.world.rank)
        return wrong

    def _setting(self, index: int, group: Group) -> Setting:
        kind, case = self._kind, self.case
        source = self._arena.window(index, 0, self._elements[kind.source], case.dtype)
        target = source
        if kind.target != "source":
            elements = self._elements[kind.target]
            target = self._arena.window(index, self._target_offset, elements, case.dtype)
        redop = _REDOPS.get(case.redop, dist.ReduceOp.SUM)
        return Setting(source, target, self.world, group, redop, case.root)


class BarrierWorkload(Workload):
    """Verified by time: no rank may leave before the last one, which comes late, has entered."""

    def __init__(self, case: Case, world: World) -> None:
        super().__init__(case, world)
        self.size = self.count = 0

    def refill(self) -> None:
        pass

    def calls(self, group: Group) -> Sequence[Call]:
        return [partial(dist.barrier, group=group)]

    def verify(self, group: Group, seed: int, plant_error: bool) -> int:
        if self.world.hosts > 1:
            self.calls(group)[0]()  # clocks of two hosts cannot be compared
            return 0
        if self.world.rank == seed % self.world.size:
            time.sleep(_LATE_SECONDS)
        entered = left = now()
        self.calls(group)[0]()
        if not plant_error:
            left = now()
        return int(left < max(self.world.gather_all(entered)))
