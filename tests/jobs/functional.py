"""Functional collectives and their gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from worlds import arith
from worlds.worker import Ctx


def functional(ctx: Ctx) -> None:
    world = dist.group.WORLD
    parts = ctx.inputs(torch.float32, (4 * ctx.size, 3))
    mine = parts[ctx.rank]
    with ctx.case("all_reduce"):
        ctx.same(funcol.all_reduce(mine, "sum", world) + 0, arith.reduced("SUM", parts))
        ctx.same(funcol.all_reduce(mine, "max", world) + 0, arith.reduced("MAX", parts))
        ctx.same(mine, parts[ctx.rank], "the input")
    with ctx.case("all_reduce avg"):
        ctx.same(funcol.all_reduce(mine, "avg", world) + 0, arith.reduced("AVG", parts))
    with ctx.case("broadcast"):
        ctx.same(funcol.broadcast(mine, ctx.size - 1, world) + 0, parts[-1])
    with ctx.case("all_gather_tensor"):
        for dim in (0, 1):
            got = funcol.all_gather_tensor(mine, dim, world) + 0
            ctx.same(got, torch.cat(parts, dim))
    with ctx.case("reduce_scatter_tensor"):
        got = funcol.reduce_scatter_tensor(mine, "sum", 0, world) + 0
        ctx.same(got, arith.reduced("SUM", parts).chunk(ctx.size)[ctx.rank])
    with ctx.case("all_to_all_single"):
        got = funcol.all_to_all_single(mine, None, None, world) + 0
        ctx.same(got, torch.cat([p.chunk(ctx.size)[ctx.rank] for p in parts]))
    with ctx.case("all_reduce_coalesced"):
        got = funcol.all_reduce_coalesced([mine, mine * 2], "sum", world)
        ctx.same(got[1] + 0, arith.reduced("SUM", [p * 2 for p in parts]))


def gradients(ctx: Ctx) -> None:
    n = ctx.size
    scale = float(sum(range(1, n + 1)))
    with ctx.case("all_reduce"):
        x = torch.ones(3, requires_grad=True)
        (dist_nn.all_reduce(x) * (ctx.rank + 1)).sum().backward()
        ctx.same(x.grad, torch.full((3,), scale))
    with ctx.case("all_gather"):
        x = torch.ones(3, requires_grad=True)
        out = dist_nn.all_gather(x)
        sum(t.sum() * (ctx.rank + 1) for t in out).backward()
        ctx.same(x.grad, torch.full((3,), scale))
    with ctx.case("broadcast"):
        x = torch.full((3,), float(ctx.rank), requires_grad=True)
        out = dist_nn.broadcast(x, 0)
        (out * (ctx.rank + 1)).sum().backward()
        ctx.same(x.grad, torch.full((3,), scale if ctx.rank == 0 else 0.0))
    with ctx.case("all_to_all_single"):
        x = torch.ones(n, 2, requires_grad=True)
        out = dist_nn.all_to_all_single(torch.zeros(n, 2), x)
        (out * (ctx.rank + 1)).sum().backward()
        ctx.same(x.grad, torch.stack([torch.full((2,), r + 1.0) for r in range(n)]))
    with ctx.case("reduce_scatter"):
        xs = [torch.ones(2, requires_grad=True) for _ in range(n)]
        (dist_nn.reduce_scatter(torch.zeros(2), xs) * (ctx.rank + 1)).sum().backward()
        for r, x in enumerate(xs):
            ctx.same(x.grad, torch.full((2,), r + 1.0))
