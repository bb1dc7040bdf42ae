"""Collectives of Python objects."""

from __future__ import annotations

import pytest
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


@pytest.mark.worlds(1, 2, 3, 5)
def test_objects(world):
    world.run(objects)


def sent_objects(ctx: Ctx) -> None:
    if ctx.rank == 0:
        for peer in range(1, ctx.size):
            dist.send_object_list([thing(peer), "x" * 100_000], dst=peer)
    else:
        items = [None, None]
        dist.recv_object_list(items, src=0)
        ctx.equal(items, [thing(ctx.rank), "x" * 100_000])
    if ctx.rank == 0:
        items = [None]
        source = dist.recv_object_list(items, src=1)
        ctx.equal((source, items), (1, ["back"]))
    elif ctx.rank == 1:
        dist.send_object_list(["back"], dst=0)


@pytest.mark.worlds(2, 3)
def test_send_and_recv_object_list(world):
    world.run(sent_objects)


def objects_in_a_group(ctx: Ctx) -> None:
    group = dist.new_group([0, 2])
    if ctx.rank != 1:
        out = [None, None]
        dist.all_gather_object(out, thing(ctx.rank), group=group)
        ctx.equal(out, [thing(0), thing(2)])
        items = [thing(9)] if ctx.rank == 2 else [None]
        dist.broadcast_object_list(items, src=2, group=group)
        ctx.equal(items, [thing(9)])
        dist.destroy_process_group(group)


@pytest.mark.worlds(3)
def test_objects_in_a_group(world):
    world.run(objects_in_a_group)
