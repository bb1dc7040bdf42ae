"""Operations that move data without computing."""

from __future__ import annotations

import torch
import torch.distributed as dist
from worlds import arith
from worlds.worker import Ctx, called, stable_seed

SIZES = (0, 1, 3, 17, 1000, 4099, 70_001)
DEVICE_SIZES = (0, 17, 70_001)  # for all dtypes but the first: no path depends on both
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex128, torch.bool)
MODES = ("sync", "async")


def cases(ctx: Ctx, function: str, root: int = 0):
    """(name, mode, dtype, numel) of a matrix; a small one for roots other than 0."""
    for dtype in DTYPES if root == 0 else DTYPES[:2]:
        for numel in SIZES if ctx.is_on_cpu or dtype == DTYPES[0] else DEVICE_SIZES:
            for mode in MODES:
                name = f"{function}/{arith.short(dtype)}/{numel}/{mode}"
                if not ctx.skips(name):
                    yield name, mode, dtype, numel


def broadcast(ctx: Ctx) -> None:
    for root in range(ctx.size):
        for name, mode, dtype, numel in cases(ctx, "broadcast", root):
            with ctx.case(f"{name}/root{root}"):
                parts = ctx.inputs(dtype, numel, root)
                x = parts[ctx.rank].clone()
                called(mode, dist.broadcast, x, root)
                ctx.same(x, parts[root])


def all_gather(ctx: Ctx) -> None:
    for name, mode, dtype, numel in cases(ctx, "all_gather"):
        with ctx.case(name):
            parts = ctx.inputs(dtype, numel)
            outs = [torch.zeros_like(parts[0]) for _ in parts]
            called(mode, dist.all_gather, outs, parts[ctx.rank].clone())
            for r, (out, part) in enumerate(zip(outs, parts, strict=True)):
                ctx.same(out, part, f"from rank {r}")


def all_gather_uneven(ctx: Ctx) -> None:
    for dtype in DTYPES:
        for mode in MODES:
            for base in (1, 100, 20_011):
                with ctx.case(f"{arith.short(dtype)}/{base}/{mode}"):
                    shapes = [(0,) if r == 1 else (base * (r + 1), r + 1) for r in range(ctx.size)]
                    parts = [arith.values(dtype, s, 7 + r) for r, s in enumerate(shapes)]
                    outs = [torch.zeros_like(p) for p in parts]
                    called(mode, dist.all_gather, outs, parts[ctx.rank].clone())
                    for r, (out, part) in enumerate(zip(outs, parts, strict=True)):
                        ctx.same(out, part, f"from rank {r}")


def all_gather_into_tensor(ctx: Ctx) -> None:
    for name, mode, dtype, numel in cases(ctx, "all_gather_into_tensor"):
        parts = ctx.inputs(dtype, (numel, 2))
        mine = parts[ctx.rank].clone()
        with ctx.case(f"{name}/concatenated"):
            out = torch.zeros((ctx.size * numel, 2), dtype=dtype)
            called(mode, dist.all_gather_into_tensor, out, mine)
            ctx.same(out, torch.cat(parts))
        with ctx.case(f"{name}/in place"):
            out = torch.zeros((ctx.size * numel, 2), dtype=dtype)
            own = out[ctx.rank * numel : (ctx.rank + 1) * numel]
            own.copy_(mine)
            called(mode, dist.all_gather_into_tensor, out, own)
            ctx.same(out, torch.cat(parts))
        if ctx.skips("all_gather_into_tensor/stacked"):
            continue
        with ctx.case(f"{name}/stacked"):
            out = torch.zeros((ctx.size, numel, 2), dtype=dtype)
            called(mode, dist.all_gather_into_tensor, out, mine)
            ctx.same(out, torch.stack(parts))
        with ctx.case(f"{name}/one row"):  # as SyncBatchNorm calls it
            out = torch.zeros((1, ctx.size * numel * 2), dtype=dtype)
            called(mode, dist.all_gather_into_tensor, out, mine.reshape(1, -1))
            ctx.same(out, torch.cat(parts).reshape(1, -1))


def gather(ctx: Ctx) -> None:
    for root in range(ctx.size):
        for name, mode, dtype, numel in cases(ctx, "gather", root):
            with ctx.case(f"{name}/root{root}"):
                parts = ctx.inputs(dtype, numel, root)
                outs = [torch.zeros_like(p) for p in parts] if ctx.rank == root else None
                mine = parts[ctx.rank].clone()
                called(mode, dist.gather, mine, outs, dst=root)
                for r, out in enumerate(outs or ()):
                    ctx.same(out, parts[r], f"from rank {r}")
                ctx.same(mine, parts[ctx.rank], "the input is unchanged:")


def scatter(ctx: Ctx) -> None:
    for root in range(ctx.size):
        for name, mode, dtype, numel in cases(ctx, "scatter", root):
            with ctx.case(f"{name}/root{root}"):
                parts = ctx.inputs(dtype, numel, root)
                out = torch.zeros_like(parts[0])
                ins = [p.clone() for p in parts] if ctx.rank == root else None
                called(mode, dist.scatter, out, ins, src=root)
                ctx.same(out, parts[ctx.rank])


def chunk(dtype: torch.dtype, numel: int, src: int, dst: int) -> torch.Tensor:
    return arith.values(dtype, numel, stable_seed(src, dst, numel))


def all_to_all(ctx: Ctx) -> None:
    """Each pair of ranks exchanges a different number of elements, which may be zero."""
    for name, mode, dtype, numel in cases(ctx, "all_to_all"):
        for kind in ("even", "uneven"):
            if ctx.skips(f"all_to_all/{kind}"):
                continue
            with ctx.case(f"{name}/{kind}"):

                def size(src: int, dst: int, numel=numel, kind=kind) -> int:
                    return numel if kind == "even" else (numel * ((src + 2 * dst) % 4)) // 2

                ranks = range(ctx.size)
                ins = [chunk(dtype, size(ctx.rank, d), ctx.rank, d) for d in ranks]
                outs = [torch.zeros(size(s, ctx.rank), dtype=dtype) for s in ranks]
                called(mode, dist.all_to_all, outs, ins)
                for s, out in enumerate(outs):
                    ctx.same(out, chunk(dtype, size(s, ctx.rank), s, ctx.rank), f"from {s}")


def all_to_all_single(ctx: Ctx) -> None:
    ranks = range(ctx.size)
    for name, mode, dtype, numel in cases(ctx, "all_to_all_single"):
        with ctx.case(f"{name}/even"):
            parts = ctx.inputs(dtype, (ctx.size, numel))
            out = torch.zeros((ctx.size, numel), dtype=dtype)
            called(mode, dist.all_to_all_single, out, parts[ctx.rank].clone())
            ctx.same(out, torch.stack([p[ctx.rank] for p in parts]))
        for kind in ("some", "zeros"):
            with ctx.case(f"{name}/splits with {kind}"):

                def rows(src: int, dst: int, numel=numel, kind=kind) -> int:
                    n = numel // 3 + (src * 3 + dst) % 5
                    return 0 if kind == "zeros" and (src + dst) % 2 else n

                send = [rows(ctx.rank, d) for d in ranks]
                receive = [rows(s, ctx.rank) for s in ranks]
                ins = torch.cat([chunk(dtype, 2 * n, ctx.rank, d) for d, n in enumerate(send)])
                out = torch.zeros((sum(receive), 2), dtype=dtype)
                called(mode, dist.all_to_all_single, out, ins.reshape(-1, 2), receive, send)
                want = torch.cat([chunk(dtype, 2 * n, s, ctx.rank) for s, n in enumerate(receive)])
                ctx.same(out, want.reshape(-1, 2))


JOBS = (
    broadcast,
    all_gather,
    all_gather_uneven,
    all_gather_into_tensor,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
)
