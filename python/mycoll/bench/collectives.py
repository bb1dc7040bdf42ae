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
from mycoll.bench.patterns import Pattern, poison
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
class Collective:
    """`source` and `target`: parts of S, the size in the table: "all" is S, "part" is S / ranks.

    `bus` turns algbw into busbw. `traffic` is how many bytes per byte of S the ranks together must
    at least move through memory.
    """

    source: str
    target: str
    bus: Callable[[int], float]
    traffic: Callable[[int], float]


def _sendrecv(source: torch.Tensor, target: torch.Tensor, world: World, group: Group) -> Call:
    """Every rank sends to the next one and receives from the one before."""
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    if world.device.type != "cpu":
        operations = [
            dist.P2POp(dist.isend, source, following, group),
            dist.P2POp(dist.irecv, target, previous, group),
        ]
        return lambda: [work.wait() for work in dist.batch_isend_irecv(operations)]

    def exchange() -> None:
        receiving = dist.irecv(target, previous, group=group)
        sending = dist.isend(source, following, group=group)
        assert receiving is not None and sending is not None
        sending.wait()
        receiving.wait()

    return exchange


_ONE, _OTHERS = (lambda p: 1.0), (lambda p: (p - 1) / p)
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


# mycoll's. They return their results, but for the first.
_OPERATORS = {"all_reduce": "all_reduce_"} | {op: op for op in ("all_gather", "reduce_scatter")}


class CollectiveWorkload(Workload):
    """A collective of torch.distributed, on windows of one arena."""

    def __init__(self, case: Case, world: World, hot: bool) -> None:
        super().__init__(case, world, hot)
        self._kind = kind = COLLECTIVES[case.op]
        self._operator = ""  # of torch.ops.mycoll: called in the place of torch's function
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
        self.arena: Arena = Arena(self.touched_bytes, world, self.hot, self.busy_ranks)

    def calls(self, group: Group) -> Sequence[Call]:
        return [self._call(*self._buffers(index), group) for index in range(self.arena.windows)]

    def with_operators(self) -> Workload:
        """The same with torch.ops.mycoll."""
        if self.case.op not in _OPERATORS or self.case.redop not in ("none", "sum"):
            raise Unsupported("")
        found = copy.copy(self)
        found._operator = _OPERATORS[self.case.op]
        return found

    def verify(self, group: Group, seed: int) -> int:
        pattern = Pattern(self.case.dtype, self.case.redop, self.world.size, seed)
        source, target = self._buffers(seed % self.arena.windows)
        if target is not source:
            poison(target)
        pattern.fill(source, self.world.rank)
        returned = self._call(source, target, group)()
        if isinstance(returned, torch.Tensor):
            target.copy_(returned)
        self.world.synchronize()
        wrong = self._wrong(target, pattern)
        if target is not source:
            # Inputs belong to the caller: an operation that changes them is as wrong.
            wrong += pattern.wrong_copy(source, self.world.rank)
        return wrong

    def _buffers(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The source and the target in a window: the same where torch works in place."""
        kind, dtype = self._kind, self.case.dtype
        source = self.arena.window(index, 0, self._elements[kind.source], dtype)
        if kind.target == "source":
            return source, source
        elements = self._elements[kind.target]
        return source, self.arena.window(index, self._target_offset, elements, dtype)

    def _call(self, source: torch.Tensor, target: torch.Tensor, group: Group) -> Call:
        """The call on these buffers."""
        if self._operator:
            operator = getattr(torch.ops.mycoll, self._operator).default
            return partial(operator, source, group.group_name)
        op, root = self.case.op, self.case.root
        redop = _REDOPS.get(self.case.redop, dist.ReduceOp.SUM)
        if op == "sendrecv":
            return _sendrecv(source, target, self.world, group)
        if op in ("gather", "scatter"):
            whole = target if op == "gather" else source
            parts = list(whole.chunk(self.world.size)) if self.world.rank == root else None
            if op == "gather":
                return partial(dist.gather, source, parts, dst=root, group=group)
            return partial(dist.scatter, target, parts, src=root, group=group)
        calls: dict[str, Callable[..., object]] = {
            "all_reduce": partial(dist.all_reduce, source, op=redop),
            "broadcast": partial(dist.broadcast, source, src=root),
            "reduce": partial(dist.reduce, source, dst=root, op=redop),
            "all_gather": partial(_all_gather, target, source),
            "reduce_scatter": partial(_reduce_scatter, target, source, op=redop),
            "all_to_all": partial(dist.all_to_all_single, target, source),
        }
        return partial(calls[op], group=group)

    def _wrong(self, target: torch.Tensor, pattern: Pattern) -> int:
        """Counts the elements of the target that were computed wrongly."""
        op, root, world = self.case.op, self.case.root, self.world
        offset = world.rank * target.numel()
        if op in ("gather", "reduce") and world.rank != root:
            return 0
        if op in ("all_reduce", "reduce"):
            return pattern.wrong_reduced(target, 0)
        if op == "reduce_scatter":
            return pattern.wrong_reduced(target, offset)
        if op in ("broadcast", "scatter"):
            return pattern.wrong_copy(target, root, offset if op == "scatter" else 0)
        if op == "sendrecv":
            return pattern.wrong_copy(target, (world.rank - 1) % world.size)
        parts = target.chunk(world.size)
        offset = offset // world.size if op == "all_to_all" else 0
        return sum(pattern.wrong_copy(part, source, offset) for source, part in enumerate(parts))


class BarrierWorkload(Workload):
    """Verified by time: no rank may leave before the last one, which comes late, has entered."""

    size = count = 0

    def calls(self, group: Group) -> Sequence[Call]:
        return [partial(dist.barrier, group=group)]

    def verify(self, group: Group, seed: int) -> int:
        if self.world.hosts > 1:
            self.calls(group)[0]()  # clocks of two hosts cannot be compared
            return 0
        if self.world.rank == seed % self.world.size:
            time.sleep(_LATE_SECONDS)
        entered = now()
        self.calls(group)[0]()
        left = now()
        return int(left < max(self.world.gather_all(entered)))
