"""The contenders of a run: torch backends, torch's floor, and the memory's limit.

All take part in the same rounds, so that each can be compared with each in pairs.
benchmarks/peers adds MPIs to them.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from mycoll._leaving import described
from mycoll._native import native, native_module
from mycoll.bench.arena import Arena, aligned
from mycoll.bench.options import Options
from mycoll.bench.workload import Call, Group, Unsupported, Workload, time_calls
from mycoll.bench.world import World
from mycoll.shared import shared_tensors

# Below this, calling the copy takes longer than copying.
_SMALLEST_COPY = 64 << 10
FLOOR = "fake"


class Contender(ABC):
    """kind: backend, floor, limit or peer."""

    shares_memory = False  # its workload has shared tensors

    def __init__(self, name: str, kind: str, world: World) -> None:
        self.name = name
        self.kind = kind
        self.world = world
        self._calls: Sequence[Call] = []  # of the case

    @abstractmethod
    def prepare(self, workload: Workload) -> None:
        """Raises Unsupported if it cannot run this."""

    def verify(self, seed: int) -> int | None:
        """Wrong elements on this rank; None if there is no result to verify."""
        return None

    @abstractmethod
    def run(self, warmups: int, iterations: int) -> list[list[int]]:
        """One round. Nanoseconds of each call, for each rank whose times this rank knows.

        Raises Unsupported, on all ranks, if it is no longer there.
        """

    def extra(self) -> dict[str, float]:
        """Further figures of the row, by name."""
        return {}

    def release(self) -> None:
        """Frees the case's memory."""
        self._calls = []

    def close(self) -> None:
        """Frees everything."""


class TorchContender(Contender):
    """Calls torch's public functions, as a user does, or torch.ops.mycoll."""

    def __init__(
        self, name: str, kind: str, world: World, group: Group, shared: bool, operators: bool
    ) -> None:
        super().__init__(name, kind, world)
        self.shares_memory = shared
        self._uses_operators = operators
        self._group = group
        self._workload: Workload | None = None
        self._host_times: list[int] = []

    def prepare(self, workload: Workload) -> None:
        self._workload = workload.with_operators() if self._uses_operators else workload
        with self._memory():
            self._calls = self._workload.calls(self._group)

    def verify(self, seed: int) -> int | None:
        assert self._workload is not None
        if self.kind == "floor":
            self._calls[0]() if self._calls else None
            return None
        with self._memory():
            return self._workload.verify(self._group, seed)

    def _memory(self) -> AbstractContextManager[None]:
        """The memory of tensors that torch makes during a call."""
        return shared_tensors() if self.shares_memory else nullcontext()

    def run(self, warmups: int, iterations: int) -> list[list[int]]:
        assert self._workload is not None
        self._workload.refill()
        for call in self._calls:
            # The Python objects of the call are warm in a real program; the data need not be.
            for argument in call.args if isinstance(call, partial) else ():
                if isinstance(argument, torch.Tensor):
                    argument.data_ptr()
        self.world.barrier()
        dist.barrier(group=self._group)
        with self._memory():
            return [time_calls(self._calls, warmups, iterations, self.world, self._host_times)]

    def extra(self) -> dict[str, float]:
        """On a device also the time until a call returned: what it costs the CPU."""
        if self.world.device.type == "cpu":
            return {}
        mine = median(self._host_times) / 1e3 if self._host_times else 0.0
        return {"cpu_us": max(self.world.gather_all(mine))}

    def release(self) -> None:
        super().release()
        self._workload = None
        self._host_times = []


Copy = Callable[[torch.Tensor, torch.Tensor], Call]  # of a target and a source


class CopyContender(Contender):
    """All ranks copy at the same time the bytes that the operation must at least move."""

    def __init__(self, name: str, world: World, hot: bool, copy: Copy) -> None:
        super().__init__(name, "limit", world)
        self._hot = hot
        self._copy = copy
        self._arena: Arena | None = None

    def prepare(self, workload: Workload) -> None:
        count = int(workload.copied_bytes)
        if count < _SMALLEST_COPY:
            raise Unsupported("")
        everybody = self.world.local_size
        self._arena = arena = Arena(2 * aligned(count), self.world, self._hot, everybody)
        self._calls = [
            self._copy(*(arena.window(i, at, count, torch.uint8) for at in (aligned(count), 0)))
            for i in range(arena.windows)
        ]

    def run(self, warmups: int, iterations: int) -> list[list[int]]:
        assert self._arena is not None
        self._arena.refill(torch.uint8)
        self.world.barrier()
        return [time_calls(self._calls, warmups, iterations, self.world, [])]

    def release(self) -> None:
        super().release()
        self._arena = None


def _copy_streaming(target: torch.Tensor, source: torch.Tensor) -> Call:
    copy = native().copy_streaming
    return partial(copy, target.data_ptr(), source.data_ptr(), target.numel())


def _copy_from_peer(world: World, target: torch.Tensor, source: torch.Tensor) -> Call:
    """A copy of the next rank's `source` by the kernel, as single copy does. All ranks of this host
    make one."""
    places = world.gather_all((os.getpid(), source.data_ptr()))
    process, address = places[(world.rank + 1) % world.size]
    ours, theirs = (
        ctypes.create_string_buffer(struct.pack("PN", place, target.numel()))
        for place in (target.data_ptr(), address)
    )
    return partial(ctypes.CDLL(None).process_vm_readv, process, ours, 1, theirs, 1, 0)


def gather_contenders(options: Options, world: World) -> tuple[list[Contender], list[str]]:
    """The contenders that are available, and a line for each backend that is not."""
    found: list[Contender] = []
    absent: list[str] = []
    patience = datetime.timedelta(seconds=options.timeout_seconds)
    kinds = [(name, "backend") for name in options.backends]
    kinds += [(FLOOR, "floor")] if options.floor and FLOOR not in options.backends else []
    for name, kind in kinds:
        shared, error = options.memory == "shared", ""
        variants = [(name, shared, False)]
        if options.memory == "both" and name.split("#")[0] == "mycoll":
            variants.append((f"{name}-shared", True, False))
        if options.ops and name == "mycoll":
            variants.append((f"{name}-ops", shared, True))
        try:
            if name == FLOOR:
                importlib.import_module("torch.testing._internal.distributed.fake_pg")
            group = dist.new_group(backend=name.split("#")[0], timeout=patience)
            assert isinstance(group, Group)
        except Exception as cause:  # whatever a backend raises: the others can still be measured
            error = described(cause)
        if errors := [text for text in world.gather_all(error) if text]:
            absent.append(f"{name}: {errors[0]}")
        else:
            found += [TorchContender(each, kind, world, group, *how) for each, *how in variants]
    if options.limit and world.device.type != "cpu":
        absent.append("copy: --limit measures the CPU's memory, not that of a device")
    elif options.limit:
        found.append(
            CopyContender("copy", world, options.hot, lambda to, of: partial(to.copy_, of))
        )
        if all(world.gather_all(native_module() is not None)):
            found.append(CopyContender("copy-nt", world, options.hot, _copy_streaming))
        else:
            absent.append("copy-nt: needs mycoll's compiled half, which has the streaming copy")
        copy = partial(_copy_from_peer, world)
        target, source = (torch.zeros(8, dtype=torch.uint8) for _ in range(2))
        is_near = world.local_size == world.size
        if is_near and all(world.gather_all(copy(target, source)() == 8)):
            found.append(CopyContender("copy-peer", world, options.hot, copy))
        else:
            absent.append("copy-peer: a rank cannot read the memory of the next one")
    return found, absent
