"""The ranks of this run. They agree through a gloo group of their own, which is not measured."""

from __future__ import annotations

import datetime
import gc
import os
import socket
import warnings
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from mycoll.bench.machine import last_level_cache_bytes
from mycoll.bench.options import Options

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """cache_bytes: the last-level caches of all cores on which this host's ranks may run."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    hosts: int
    device: torch.device
    cache_bytes: int

    def barrier(self) -> None:
        """Blocks without spinning, so that others can be measured meanwhile."""
        dist.barrier()

    def share(self, value: T, source: int = 0) -> T:
        """The source rank's value, on every rank."""
        box: list[T] = [value]
        dist.broadcast_object_list(box, src=source)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value on rank 0, nothing elsewhere."""
        boxes: list[T] | None = [value] * self.size if self.rank == 0 else None
        dist.gather_object(value, boxes, dst=0)
        return boxes or []

    def gather_all(self, value: T) -> list[T]:
        """Every rank's value on every rank."""
        boxes: list[T] = [value] * self.size
        dist.all_gather_object(boxes, value)
        return boxes


def missing_device(options: Options) -> str:
    """Why this process has no such device; '' if it has one."""
    try:
        kind = torch.device(options.device).type
    except RuntimeError:
        return f"--device: torch knows no '{options.device}'"
    is_here = kind == "cpu" or torch.accelerator.is_available()
    return "" if is_here else f"this machine has no {options.device} device"


def join(options: Options) -> World:
    """Makes the group in which the ranks of a launcher agree, unless it has made that itself."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    torch.set_num_threads(1)
    gc.disable()  # collected between cases instead: not while a clock runs
    device = torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if options.device != "cpu":
        device = torch.device(options.device, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    patience = datetime.timedelta(seconds=10 * options.timeout_seconds)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=patience)
    me = (socket.gethostname(), os.sched_getaffinity(0))
    everybody = [me] * dist.get_world_size()
    dist.all_gather_object(everybody, me)
    neighbours = [cpus for name, cpus in everybody if name == me[0]]
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank,
        local_size=len(neighbours),
        hosts=len({name for name, _ in everybody}),
        device=device,
        cache_bytes=last_level_cache_bytes(set().union(*neighbours)),
    )


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
