"""Groups of some of the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from worlds.worker import Ctx


def check(ctx: Ctx, group: dist.ProcessGroup, members: list[int]) -> None:
    """Runs a few operations in a group; all its members call this."""
    x = torch.full((1000,), float(ctx.rank))
    dist.all_reduce(x, group=group)
    ctx.equal(float(x[7]), float(sum(members)), f"all_reduce of {members}")
    y = torch.full((3,), float(ctx.rank))
    dist.broadcast(y, members[-1], group=group)
    ctx.equal(float(y[0]), float(members[-1]), "broadcast")
    outs = [torch.zeros(1) for _ in members]
    dist.all_gather(outs, torch.tensor([float(ctx.rank)]), group=group)
    ctx.equal([int(o) for o in outs], members, "all_gather")
    dist.barrier(group=group)


def subsets(ctx: Ctx) -> None:
    ranks = list(range(ctx.size))
    for members in (ranks, ranks[:1], ranks[1:], ranks[::2], ranks[-2:]):
        group = dist.new_group(members)
        if ctx.rank in members:
            with ctx.case(f"{members}"):
                check(ctx, group, members)
                dist.destroy_process_group(group)


def destroyed_in_any_order(ctx: Ctx) -> None:
    groups = [dist.new_group() for _ in range(6)]
    for group in groups:
        dist.all_reduce(torch.ones(3), group=group)
    order = [4, 0, 5, 2, 1, 3]
    for at, i in enumerate(order if ctx.rank % 2 else reversed(order)):
        dist.destroy_process_group(groups[i])
        if at == 2:
            check(ctx, dist.group.WORLD, list(range(ctx.size)))
    check(ctx, dist.group.WORLD, list(range(ctx.size)))
