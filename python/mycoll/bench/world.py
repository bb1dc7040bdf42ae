"""The ranks of this run: they agree through a gloo group that is never what is measured."""

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

from mycoll.bench.options import Options

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_rank: int
    local_size: int
    hosts: int
    device: torch.device

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


def join(options: Options) -> World:
    """Joins the ranks named by torchrun's environment variables."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    torch.set_num_threads(options.threads)
    gc.disable()  # collected between cases instead: not while a clock runs
    device = torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if options.device != "cpu":
        if not torch.accelerator.is_available():
            raise SystemExit(f"mycoll bench: this machine has no {options.device} device")
        device = torch.device(options.device, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    patience = datetime.timedelta(seconds=10 * options.timeout_seconds)
    dist.init_process_group("gloo", timeout=patience)
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank,
        local_size=names.count(names[dist.get_rank()]),
        hosts=len(set(names)),
        device=device,
    )


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
