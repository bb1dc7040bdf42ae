"""Collectives of Python objects."""

from __future__ import annotations

import torch
import torch.distributed as dist
from worlds.worker import Ctx


def thing(rank: int) -> dict:
    return {"rank": rank, "list": list(range(rank * 100)), "text": "é" * rank, 3: (None, 1.5)}


def objects(ctx: Ctx) -> None:
    ranks = range(ctx.size)
    for root in ranks:
        with ctx.case(f"broadcast_object_list from {root}"):
            items = [thing(root), root, None] if ctx.rank == root else [None, None, None]
            dist.broadcast_object_list(items, src=root)
            ctx.equal(items, [thing(root), root, None])
        with ctx.case(f"gather_object to {root}"):
            out = [None] * ctx.size if ctx.rank == root else None
            dist.gather_object(thing(ctx.rank), out, dst=root)
            if out is not None:
                ctx.equal(out, [thing(r) for r in ranks])
        with ctx.case(f"scatter_object_list from {root}"):
            out = [None]
            ins = [thing(r + root) for r in ranks] if ctx.rank == root else None
            dist.scatter_object_list(out, ins, src=root)
            ctx.equal(out, [thing(ctx.rank + root)])
    with ctx.case("all_gather_object"):
        out = [None] * ctx.size
        dist.all_gather_object(out, thing(ctx.rank))
        ctx.equal(out, [thing(r) for r in ranks])
    with ctx.case("all_gather_object of tensors"):
        out = [None] * ctx.size
        dist.all_gather_object(out, torch.full((ctx.rank, 2), ctx.rank))
        for r, tensor in enumerate(out):
            ctx.same(tensor, torch.full((r, 2), r))
