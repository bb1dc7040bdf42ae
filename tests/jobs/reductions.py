"""Reductions, compared with the reference arithmetic."""

from __future__ import annotations

import torch
import torch.distributed as dist
from worlds import arith
from worlds.worker import Ctx, called

SIZES = (0, 1, 3, 17, 1000, 4099)
DEVICE_SIZES = (0, 17, 4099)  # for all dtypes but one: no path of a device depends on both
FACTORS = (0.5, 3.0, -1.25, 2.0, 0.125)  # exact in every float dtype
PREMUL_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def premul_sum(factor: float | torch.Tensor) -> dist.ReduceOp:
    return dist._make_nccl_premul_sum(factor)


def matrix(ctx: Ctx, function: str):
    """(name, mode, dtype, op, numel) of each case of the matrix, alternating sync and async."""
    turn = 0
    for dtype in arith.REDUCIBLE:
        for numel in SIZES if ctx.is_on_cpu or dtype == torch.float32 else DEVICE_SIZES:
            for op in arith.ops_of(dtype):
                turn += 1
                name = f"{function}/{op}/{arith.short(dtype)}/{numel}"
                if not ctx.skips(name):
                    yield name, ("sync", "async")[turn % 2], dtype, op, numel


def all_reduce_cases(ctx: Ctx) -> str:
    for name, mode, dtype, op, numel in matrix(ctx, "all_reduce"):
        with ctx.case(f"{name}/{mode}"):
            parts = ctx.inputs(dtype, numel)
            x = parts[ctx.rank].clone()
            called(mode, dist.all_reduce, x, op=arith.reduce_op(op))
            ctx.same(x, arith.reduced(op, parts))
            ctx.digest(x)
    return ctx.digests()


def all_reduce_big(ctx: Ctx) -> str:
    for dtype, numel in (
        (torch.float32, 70_001),
        (torch.float16, 70_001),
        (torch.bfloat16, 300_007),
        (torch.float8_e4m3fn, 70_001),
        (torch.int64, 70_001),
        (torch.bool, 70_001),
        (torch.complex64, 70_001),
        (torch.float32, 1_000_003),
        (torch.uint8, 5_000_011),
    ):
        name = f"all_reduce/SUM/{arith.short(dtype)}/{numel}"
        if ctx.skips(name):
            continue
        parts = ctx.inputs(dtype, numel, seed=numel)
        want = arith.reduced("SUM", parts)
        for mode in ("sync", "async"):
            with ctx.case(f"{name}/{mode}"):
                x = parts[ctx.rank].clone()
                called(mode, dist.all_reduce, x)
                ctx.same(x, want)
                ctx.digest(x)
    return ctx.digests()


def nan_cases(ctx: Ctx) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [
        [nan, 1.0, inf, -inf, 2.0, nan, 0.5],
        [1.0, nan, 1.0, inf, -3.0, nan, 0.25],
        [2.0, 2.0, -inf, nan, 2.0, nan, 4.0],
    ]
    for dtype in arith.FLOATS:
        if dtype == torch.float8_e4m3fn:
            continue  # has no infinities
        for op in ("MIN", "MAX", "SUM"):
            name = f"all_reduce/{op}/{arith.short(dtype)}/nan"
            if ctx.skips(name):
                continue
            with ctx.case(name):
                parts = [torch.tensor(rows[r % 3]).to(dtype) for r in range(ctx.size)]
                x = parts[ctx.rank].clone()
                dist.all_reduce(x, op=arith.reduce_op(op))
                ctx.same(x, arith.reduced(op, parts))


def integer_average(ctx: Ctx) -> None:
    for dtype in arith.SIGNED:
        with ctx.case(f"AVG/{arith.short(dtype)}"):
            x = torch.tensor([-1, 1, -7, 7, 100], dtype=dtype)
            if ctx.rank:
                x.zero_()
            dist.all_reduce(x, op=dist.ReduceOp.AVG)
            want = [int(v / ctx.size) for v in (-1, 1, -7, 7, 100)]
            ctx.same(x, torch.tensor(want, dtype=dtype), "truncates toward zero:")


def premul_cases(ctx: Ctx) -> None:
    factors = FACTORS[: ctx.size]
    for dtype in PREMUL_DTYPES:
        for numel in (1, 17, 4099):
            for kind in ("number", "tensor"):
                with ctx.case(f"PREMUL_SUM/{arith.short(dtype)}/{numel}/{kind}"):
                    parts = ctx.inputs(dtype, numel)
                    mine = factors[ctx.rank]
                    op = premul_sum(mine if kind == "number" else torch.tensor([mine]).to(dtype))
                    want = arith.reduced("PREMUL_SUM", parts, factors)
                    x = parts[ctx.rank].clone()
                    dist.all_reduce(x, op=op)
                    ctx.same(x, want, "all_reduce")
                    flat = [torch.cat([p] * ctx.size) for p in parts]
                    y = torch.empty(numel, dtype=dtype)
                    dist.reduce_scatter_tensor(y, flat[ctx.rank].clone(), op=op)
                    ctx.same(y, want, "reduce_scatter_tensor")


def reduce_cases(ctx: Ctx) -> None:
    for name, mode, dtype, op, numel in matrix(ctx, "reduce"):
        if numel == 1000:
            continue
        root = arith.REDUCIBLE.index(dtype) % ctx.size
        with ctx.case(f"{name}/root{root}/{mode}"):
            parts = ctx.inputs(dtype, numel, seed=1)
            x = parts[ctx.rank].clone()
            called(mode, dist.reduce, x, root, op=arith.reduce_op(op))
            if ctx.rank == root:
                ctx.same(x, arith.reduced(op, parts))
            elif not ctx.skips("reduce/untouched"):
                ctx.same(x, parts[ctx.rank], "a rank that is not the root is unchanged:")


def reduce_scatter_cases(ctx: Ctx) -> None:
    for name, mode, dtype, op, numel in matrix(ctx, "reduce_scatter"):
        if numel == 1000:
            continue
        with ctx.case(f"{name}/{mode}"):
            parts = ctx.inputs(dtype, (ctx.size, numel), seed=3)
            want = arith.reduced(op, [p[ctx.rank].contiguous() for p in parts])
            mine = parts[ctx.rank]
            red = arith.reduce_op(op)

            y = torch.zeros(numel, dtype=dtype)
            called(mode, dist.reduce_scatter, y, [m.clone() for m in mine], op=red)
            ctx.same(y, want)

            y = torch.zeros(numel, dtype=dtype)
            called(mode, dist.reduce_scatter_tensor, y, mine.reshape(-1).clone(), op=red)
            ctx.same(y, want)


def reduce_scatter_uneven(ctx: Ctx) -> None:
    for dtype in (torch.float32, torch.float16, torch.int64):
        for base in (0, 3, 1000, 70_001):
            sizes = [base + 7 * r if r != 1 else 0 for r in range(ctx.size)]
            chunks = [
                [arith.values(dtype, sizes[d], 100 * s + d) for d in range(ctx.size)]
                for s in range(ctx.size)
            ]
            want = arith.reduced("SUM", [c[ctx.rank] for c in chunks])
            for mode in ("sync", "async"):
                with ctx.case(f"{arith.short(dtype)}/{base}/{mode}"):
                    y = torch.zeros(sizes[ctx.rank], dtype=dtype)
                    called(mode, dist.reduce_scatter, y, [one.clone() for one in chunks[ctx.rank]])
                    ctx.same(y, want)


def reduce_scatter_big(ctx: Ctx) -> None:
    numel = 200_003
    parts = ctx.inputs(torch.float32, (ctx.size, numel))
    if not ctx.skips("reduce_scatter_tensor/stacked"):
        y = torch.empty(numel)
        dist.reduce_scatter_tensor(y, parts[ctx.rank])
        ctx.same(y, arith.reduced("SUM", [p[ctx.rank] for p in parts]), "stacked")
    want = arith.reduced("SUM", [p[ctx.rank] for p in parts]).clone()
    x = parts[ctx.rank].reshape(-1)  # the output may be a slice of the input
    out = x[ctx.rank * numel : (ctx.rank + 1) * numel]
    dist.reduce_scatter_tensor(out, x)
    ctx.same(out, want, "in place")
