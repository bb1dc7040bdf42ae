"""Several tensors in one call, and `_coalescing_manager`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager
from worlds import arith
from worlds.worker import Ctx, called

SHAPES = ((3,), (0,), (17, 2), (4099,), (1,))


def mine(ctx: Ctx) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """This rank's tensors, and those of all ranks for each of them."""
    parts = [ctx.inputs(torch.float32, shape, i) for i, shape in enumerate(SHAPES)]
    return [p[ctx.rank].clone() for p in parts], parts


def coalesced_calls(ctx: Ctx, mode: str) -> None:
    tensors, parts = mine(ctx)
    with ctx.case("all_reduce_coalesced"):
        called(mode, dist.all_reduce_coalesced, tensors)
        for t, p in zip(tensors, parts, strict=True):
            ctx.same(t, arith.reduced("SUM", p))
    tensors, parts = mine(ctx)
    with ctx.case("all_gather_coalesced"):
        outs = [[torch.zeros_like(t) for t in tensors] for _ in range(ctx.size)]
        called(mode, dist.all_gather_coalesced, outs, tensors)
        for r in range(ctx.size):
            for i, out in enumerate(outs[r]):
                ctx.same(out, parts[i][r], f"tensor {i} of rank {r}")


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.worlds(1, 2, 3, tcp=(3,))
def test_coalesced_calls(world, mode):
    world.run(coalesced_calls, mode)


def manager(ctx: Ctx, mode: str) -> None:
    cpu = torch.device("cpu")
    for device in (None, cpu):
        if device and ctx.skips("_coalescing_manager/device"):
            continue

        def run(body, device=device) -> None:
            with _coalescing_manager(device=device, async_ops=mode == "async") as cm:
                body()
            if mode == "async":
                cm.wait()

        with ctx.case(f"all_reduce, device={device}"):
            tensors, parts = mine(ctx)
            run(lambda t=tensors: [dist.all_reduce(x) for x in t])
            for t, p in zip(tensors, parts, strict=True):
                ctx.same(t, arith.reduced("SUM", p))
        with ctx.case(f"all_gather_into_tensor, device={device}"):
            tensors, parts = mine(ctx)
            outs = [torch.zeros((ctx.size * t.shape[0], *t.shape[1:])) for t in tensors]
            run(
                lambda t=tensors, o=outs: [
                    dist.all_gather_into_tensor(a, b) for a, b in zip(o, t, strict=True)
                ]
            )
            for out, p in zip(outs, parts, strict=True):
                ctx.same(out, torch.cat(p))
        with ctx.case(f"reduce_scatter_tensor, device={device}"):
            wide = [ctx.inputs(torch.float32, (ctx.size * n,), 50 + n) for n in (1, 5, 1000)]
            outs = [torch.zeros(n) for n in (1, 5, 1000)]
            run(
                lambda o=outs, w=wide: [
                    dist.reduce_scatter_tensor(a, b[ctx.rank]) for a, b in zip(o, w, strict=True)
                ]
            )
            for out, parts_ in zip(outs, wide, strict=True):
                mine_ = [p.chunk(ctx.size)[ctx.rank] for p in parts_]
                ctx.same(out, arith.reduced("SUM", mine_))


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.worlds(1, 2, 3, tcp=(3,))
def test_coalescing_manager(world, mode):
    world.run(manager, mode)


def manager_of_mixed_ops(ctx: Ctx) -> None:
    """Different operations in one block, with a device: each is issued as it comes."""
    x, y = torch.full((5,), float(ctx.rank)), torch.full((3,), float(ctx.rank))
    with _coalescing_manager(device=torch.device("cpu")):
        dist.broadcast(y, 1)
        dist.all_reduce(x)
    ctx.same(y, torch.ones(3))
    ctx.equal(float(x[0]), float(sum(range(ctx.size))))


@pytest.mark.worlds(2)
def test_coalescing_manager_of_mixed_ops(world):
    world.run(manager_of_mixed_ops)
