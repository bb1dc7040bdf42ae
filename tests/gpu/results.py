"""Results of operations on this rank, for comparing one backend with another."""

from __future__ import annotations

import torch
import torch.distributed as dist
from worlds.worker import called

OPERATIONS = (
    *(f"all_reduce {op}" for op in ("SUM", "MIN", "MAX", "PRODUCT", "AVG")),
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "gather",
    "scatter",
)


def run(
    name: str, mode: str, mine: torch.Tensor, group: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """The operation's outputs on this rank; mode: "sync" or "async"."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x = mine.clone()
    if name.startswith("all_reduce"):
        called(mode, dist.all_reduce, x, op=getattr(dist.ReduceOp, name.split()[1]), group=group)
        return [x]
    if name == "broadcast":
        called(mode, dist.broadcast, x, size - 1, group=group)
        return [x]
    if name == "reduce":
        called(mode, dist.reduce, x, 0, group=group)
        return [x] if rank == 0 else []
    if name == "all_gather":
        outs = [torch.zeros_like(x) for _ in range(size)]
        called(mode, dist.all_gather, outs, x, group=group)
        return outs
    if name == "all_gather_into_tensor":
        out = x.new_zeros(x.numel() * size)
        called(mode, dist.all_gather_into_tensor, out, x, group=group)
        return [out]
    if name == "reduce_scatter_tensor":
        out = torch.zeros_like(x)
        called(mode, dist.reduce_scatter_tensor, out, x.repeat(size), group=group)
        return [out]
    if name == "all_to_all_single":
        out = x.new_zeros(x.numel() * size)
        called(mode, dist.all_to_all_single, out, x.repeat(size), group=group)
        return [out]
    if name == "gather":
        outs = [torch.zeros_like(x) for _ in range(size)] if rank == 0 else []
        called(mode, dist.gather, x, outs or None, dst=0, group=group)
        return outs
    assert name == "scatter"
    out = torch.zeros_like(x)
    parts = [x * (r + 1) for r in range(size)] if rank == 0 else None
    called(mode, dist.scatter, out, parts, src=0, group=group)
    return [out]
