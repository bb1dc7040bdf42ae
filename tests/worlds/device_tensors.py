"""Functions that jobs with device tensors share."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from worlds import device
from worlds.worker import Ctx

NUMEL = 5000


def here(ctx: Ctx) -> torch.Stream:
    return torch.accelerator.current_stream(ctx.device)


def full(ctx: Ctx, value: float, numel: int = NUMEL) -> torch.Tensor:
    return torch.full((numel,), float(value), device=ctx.device)


def total(ctx: Ctx) -> float:
    return float(sum(range(1, ctx.size + 1)))


def is_all(ctx: Ctx, tensor: torch.Tensor, value: float, what: str = "") -> None:
    ctx.same(tensor, torch.full(tensor.shape, float(value)), what)


def warm_up(ctx: Ctx) -> None:
    """Makes the connections, which may wait for the device."""
    dist.all_reduce(full(ctx, 1))
    here(ctx).synchronize()


def captured_all_reduce(ctx: Ctx) -> tuple[torch.Tensor, Any]:
    """A graph with one all_reduce, and its tensor. An all_reduce before it connects."""
    x = full(ctx, 1)
    dist.all_reduce(x)
    torch.accelerator.synchronize()
    graph = device.graph_on(ctx.device)
    with graph.capture():
        dist.all_reduce(x)
    return x, graph


def wait_for_all(ctx: Ctx) -> None:
    """Waits until all ranks have raised their errors, before any of them leaves the group."""
    store = ctx.store("all")
    store.set(str(ctx.rank), "")
    store.wait([str(rank) for rank in range(ctx.size)], timedelta(seconds=60))


class Pool:
    """A pool with the interface of torch.cuda.MemPool that holds one segment."""

    def __init__(self, device: torch.device, address: int, size: int) -> None:
        self._segment = {
            "device_type": device.type,
            "device": device.index,
            "address": address,
            "total_size": size,
        }

    def snapshot(self) -> tuple[dict[str, Any], ...]:
        return (self._segment,)


def slow(ctx: Ctx) -> None:
    """Delays the current stream by 30 ms."""
    if ctx.device.type == "cuda":
        torch.cuda._sleep(50_000_000)
    else:
        torch.standin.sleep(30_000)
