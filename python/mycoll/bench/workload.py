"""Cases and workloads: what a row measures, the interface of an operation, and how it is timed.

Calls are timed by the monotonic clock, on an accelerator by events on the current stream.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise

import torch
import torch.distributed as dist

from mycoll.bench.arena import Arena
from mycoll.bench.world import World

# So few calls do not fill a device's queue: behind a full one, a call waits for the device.
_UNTHROTTLED_CALLS = 50

now: Callable[[], int] = time.perf_counter_ns


Call = Callable[[], object]
Group = dist.ProcessGroup
PAIR = (0, 1)  # the ranks of operations between two


def time_calls(
    calls: Sequence[Call], warmups: int, count: int, world: World, host_times: list[int]
) -> list[int]:
    """Nanoseconds of each of `count` calls, which are used in turn, after untimed ones.

    host_times: where the device is not the CPU, gets the nanoseconds until calls returned.
    """
    schedule = list(islice(cycle(calls), warmups + count))
    for call in schedule[:warmups]:
        call()
    timed = schedule[warmups:]
    if world.device.type != "cpu":
        return _time_on_device(timed, world, host_times)
    stamps = [0] * len(timed)
    begin = now()
    for index, call in enumerate(timed):
        call()
        stamps[index] = now()
    return [after - before for before, after in pairwise([begin, *stamps])]


def _time_on_device(calls: Sequence[Call], world: World, host_times: list[int]) -> list[int]:
    world.synchronize()
    events = [torch.Event(world.device.type, enable_timing=True) for _ in range(len(calls) + 1)]
    stamps = []
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        begin = now()
        call()
        stamps.append(now() - begin)
        event.record()
    world.synchronize()
    host_times += stamps[:_UNTHROTTLED_CALLS]
    return [int(before.elapsed_time(after) * 1e6) for before, after in pairwise(events)]


class Unsupported(Exception):
    """This contender cannot run this case; the message says why in one line."""


@dataclass(frozen=True)
class Case:
    """The operation, size and types that a row measures."""

    op: str
    size: int
    dtype_name: str
    redop: str
    root: int

    @property
    def title(self) -> str:
        """The case in one line."""
        redop = "" if self.redop == "none" else f" {self.redop}"
        size = "" if self.op == "barrier" else f" {self.size} B {self.dtype_name}"
        return f"{self.op}{size}{redop}"

    @property
    def dtype(self) -> torch.dtype:
        """torch's dtype of the name."""
        dtype = getattr(torch, self.dtype_name)
        assert isinstance(dtype, torch.dtype)
        return dtype


class Workload(ABC):
    """One case, bound to this rank's buffers; every contender runs it on the same ones.

    size          bytes, rounded to what the operation can divide
    count         elements as nccl-tests counts them
    messages      how many transfers one call makes: its time is divided by it
    bus_factor    algbw times this is busbw
    copied_bytes  what each rank would have to copy if memory were the only limit
    touched_bytes what one call reads and writes on this rank
    pairwise      only two ranks take part
    """

    size: int
    count: int
    messages: int = 1
    bus_factor: float = 1.0
    copied_bytes: float = 0.0
    touched_bytes: int = 0
    pairwise: bool = False
    arena: Arena | None = None

    def __init__(self, case: Case, world: World, hot: bool) -> None:
        self.case = case
        self.world = world
        self.hot = hot  # the buffers are reused

    @property
    def busy_ranks(self) -> int:
        """How many ranks of this host move data in a call."""
        return min(len(PAIR), self.world.local_size) if self.pairwise else self.world.local_size

    def refill(self) -> None:
        """New data in every buffer, and none of it in cache."""
        if self.arena is not None:
            self.arena.refill(self.case.dtype)

    @abstractmethod
    def calls(self, group: Group) -> Sequence[Call]:
        """One call for each set of buffers; empty on a rank that takes no part."""

    def with_operators(self) -> Workload:
        """The same with torch.ops.mycoll, on the same buffers."""
        raise Unsupported("")

    @abstractmethod
    def verify(self, group: Group, seed: int) -> int:
        """Runs the operation once on telling data; the number of wrong elements on this rank."""
