"""The collectives: their buffers, the call in torch's words, and what must come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from mycoll.bench.arena import Arena, aligned
from mycoll.bench.clock import late_entry, now
from mycoll.bench.patterns import Pattern, poison, spoil
from mycoll.bench.workload import Call, Case, Group, Unsupported, Workload
from mycoll.bench.world import World

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
class Buffers:
    """`target` is `source` where torch works in place."""

    source: torch.Tensor
    target: torch.Tensor


Bind = Callable[[Buffers, Case, World, Group], Call]
Check = Callable[[Buffers, Case, World, Pattern], int]


@dataclass(frozen=True)
class Collective:
    """`source` and `target`: parts of S, the size in the table: "all" is S, "part" is S / ranks.

    `traffic` is how many bytes per byte of S the ranks together must at least move through memory.
    """

    source: str
    target: str
    bus: Callable[[int], float]
    traffic: Callable[[int], float]
    bind: Bind
    check: Check


def _bind_all_reduce(io: Buffers, case: Case, world: World, group: Group) -> Call:
    return partial(dist.all_reduce, io.source, op=_REDOPS[case.redop], group=group)


def _bind_broadcast(io: Buffers, case: Case, world: World, group: Group) -> Call:
    return partial(dist.broadcast, io.source, src=case.root, group=group)


def _bind_reduce(io: Buffers, case: Case, world: World, group: Group) -> Call:
    return partial(dist.reduce, io.source, dst=case.root, op=_REDOPS[case.redop], group=group)


def _bind_all_gather(io: Buffers, case: Case, world: World, group: Group) -> Call:
    return partial(_all_gather, io.target, io.source, group=group)


def _bind_reduce_scatter(io: Buffers, case: Case, world: World, group: Group) -> Call:
    op = _REDOPS[case.redop]
    return partial(_reduce_scatter, io.target, io.source, op=op, group=group)


def _bind_all_to_all(io: Buffers, case: Case, world: World, group: Group) -> Call:
    return partial(dist.all_to_all_single, io.target, io.source, group=group)


def _bind_gather(io: Buffers, case: Case, world: World, group: Group) -> Call:
    parts = list(io.target.chunk(world.size)) if world.rank == case.root else None
    return partial(dist.gather, io.source, parts, dst=case.root, group=group)


def _bind_scatter(io: Buffers, case: Case, world: World, group: Group) -> Call:
    parts = list(io.source.chunk(world.size)) if world.rank == case.root else None
    return partial(dist.scatter, io.target, parts, src=case.root, group=group)


def _bind_sendrecv(io: Buffers, case: Case, world: World, group: Group) -> Call:
    """Everybody sends to the next rank and receives from the one before."""
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


def _check_reduced(io: Buffers, case: Case, world: World, pattern: Pattern) -> int:
    return pattern.wrong_reduced(io.target, 0)


def _check_broadcast(io: Buffers, case: Case, world: World, pattern: Pattern) -> int:
    return pattern.wrong_copy(io.target, case.root)


def _check_at_root(io: Buffers, case: Case, world: World, pattern: Pattern) -> int:
    return pattern.wrong_reduced(io.target, 0) if world.rank == case.root else 0


def _check_all_gather(io: Buffers, case: Case, world: World, pattern: Pattern) -> int:
    return sum(
        pattern.wrong_copy(part, rank) for rank, part in enumerate(io.target.chunk(world.size))
    )


def _check_reduce_scatter(io: Buffers, case: Case, world: World, pattern: Pattern) -> int:
    return pattern.wrong_reduced(io.target, world.rank * io.target.numel())


def _check_all_to_all(io: Buffers, case: Case, world: World, pattern: Pattern) -> int:
    parts = io.target.chunk(world.size)
    offset = world.rank * parts[0].numel()
    return sum(pattern.wrong_copy(part, rank, offset) for rank, part in enumerate(parts))


def _check_gather(io: Buffers, case: Case, world: World, pattern: Pattern) -> int:
    return _check_all_gather(io, case, world, pattern) if world.rank == case.root else 0


def _check_scatter(io: Buffers, case: Case, world: World, pattern: Pattern) -> int:
    return pattern.wrong_copy(io.target, case.root, world.rank * io.target.numel())


def _check_sendrecv(io: Buffers, case: Case, world: World, pattern: Pattern) -> int:
    return pattern.wrong_copy(io.target, (world.rank - 1) % world.size)


def _one(ranks: int) -> float:
    return 1.0


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


COLLECTIVES = {
    "all_reduce": Collective(
        "all",
        "source",
        lambda p: 2 * (p - 1) / p,
        lambda p: 2 * p,
        _bind_all_reduce,
        _check_reduced,
    ),
    "broadcast": Collective("all", "source", _one, lambda p: p, _bind_broadcast, _check_broadcast),
    "reduce": Collective("all", "source", _one, lambda p: p + 1, _bind_reduce, _check_at_root),
    "all_gather": Collective(
        "part", "all", _others, lambda p: p + 1, _bind_all_gather, _check_all_gather
    ),
    "reduce_scatter": Collective(
        "all", "part", _others, lambda p: p + 1, _bind_reduce_scatter, _check_reduce_scatter
    ),
    "all_to_all": Collective(
        "all", "all", _others, lambda p: 2 * p, _bind_all_to_all, _check_all_to_all
    ),
    "gather": Collective("part", "all", _others, lambda p: 2, _bind_gather, _check_gather),
    "scatter": Collective("all", "part", _others, lambda p: 2, _bind_scatter, _check_scatter),
    "sendrecv": Collective("all", "all", _one, lambda p: 2 * p, _bind_sendrecv, _check_sendrecv),
}
_IN_PLACE = ("all_gather", "reduce_scatter", "gather", "scatter")


class CollectiveWorkload(Workload):
    def __init__(self, case: Case, world: World, hot: bool) -> None:
        super().__init__(case, world)
        self._kind = kind = COLLECTIVES[case.op]
        if case.in_place and case.op not in _IN_PLACE and kind.target != "source":
            raise Unsupported(f"{case.op} cannot work in place")
        if case.op == "sendrecv" and world.size < 2:
            raise Unsupported("sendrecv needs two ranks")
        whole = max(1, case.size // case.dtype.itemsize)
        parted = "part" in (kind.source, kind.target) or case.op == "all_to_all"
        if parted:
            whole = max(1, whole // world.size) * world.size
        self.size = whole * case.dtype.itemsize
        self.count = whole // world.size if parted else whole
        self.bus_factor = kind.bus(world.size)
        self.copied_bytes = kind.traffic(world.size) * self.size / (2 * world.size)
        self._elements = {"all": whole, "part": whole // world.size, "source": 0}
        source_bytes = aligned(self._elements[kind.source] * case.dtype.itemsize)
        target_bytes = aligned(self._elements[kind.target] * case.dtype.itemsize)
        self._target_offset = 0 if case.in_place else source_bytes
        both = source_bytes + target_bytes
        self.touched_bytes = max(source_bytes, target_bytes) if case.in_place else both
        self._arena = Arena(self.touched_bytes, world, hot, self.busy_ranks)

    def refill(self) -> None:
        self._arena.refill(self.case.dtype)

    def calls(self, group: Group) -> Sequence[Call]:
        return [
            self._kind.bind(self._buffers(index), self.case, self.world, group)
            for index in range(self._arena.windows)
        ]

    def verify(self, group: Group, seed: int, plant_error: bool) -> int:
        pattern = Pattern(self.case.dtype, self.case.redop, self.world.size, seed)
        io = self._buffers(seed % self._arena.windows)
        if self._kind.target != "source":
            poison([io.target])
        pattern.fill(io.source, self.world.rank)
        self._kind.bind(io, self.case, self.world, group)()
        if self.world.device.type != "cpu":
            torch.accelerator.synchronize(self.world.device)
        if plant_error:
            spoil(io.target)
        wrong = self._kind.check(io, self.case, self.world, pattern)
        if self._kind.target != "source" and not self.case.in_place:
            # Inputs belong to the caller: an operation that changes them is as wrong.
            wrong += pattern.wrong_copy(io.source, self.world.rank)
        return wrong

    def _buffers(self, index: int) -> Buffers:
        kind, dtype = self._kind, self.case.dtype
        if kind.target == "source":
            both = self._arena.window(index, 0, self._elements["all"], dtype)
            return Buffers(both, both)
        sources, targets = self._elements[kind.source], self._elements[kind.target]
        source_offset, target_offset = 0, self._target_offset
        if self.case.in_place:
            # nccl's convention: a rank's part lies at its place in the whole.
            part = self.world.rank * self._elements["part"] * dtype.itemsize
            source_offset = part if kind.source == "part" else 0
            target_offset = part if kind.target == "part" else 0
        return Buffers(
            self._arena.window(index, source_offset, sources, dtype),
            self._arena.window(index, target_offset, targets, dtype),
        )


class BarrierWorkload(Workload):
    """Verified by time: nobody may leave before the last one, who comes late, has entered."""

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
        late_entry(self.world.rank == seed % self.world.size)
        entered = now()
        left = now()
        self.calls(group)[0]()
        if not plant_error:
            left = now()
        return int(left < max(self.world.gather_all(entered)))
