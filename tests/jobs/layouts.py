"""Tensors of all shapes and strides."""

from __future__ import annotations

import torch
import torch.distributed as dist
from worlds import arith
from worlds.worker import Ctx

LAYOUTS = ("transposed", "strided", "offset", "channels_last", "column", "flipped dims")


def laid_out(kind: str, values: torch.Tensor) -> torch.Tensor:
    """A tensor with these (12, 10) values in another layout; its gaps hold a marker."""
    if kind == "transposed":
        return values.t().contiguous().t()
    if kind == "strided":
        x = torch.full((24, 30), -99.0, dtype=values.dtype)[::2, ::3]
    elif kind == "offset":
        x = torch.full((14, 10), -99.0, dtype=values.dtype)[1:13]
    elif kind == "column":
        x = torch.full((12, 10, 3), -99.0, dtype=values.dtype)[:, :, 1]
    elif kind == "channels_last":
        shape = (2, 3, 2, 10)
        x = torch.empty(shape, dtype=values.dtype).contiguous(memory_format=torch.channels_last)
        return x.copy_(values.reshape(shape))
    else:
        x = torch.full((5, 2, 12), -99.0, dtype=values.dtype).permute(2, 0, 1)
        return x.copy_(values.reshape(12, 5, 2))
    return x.copy_(values)


def base_of(x: torch.Tensor) -> torch.Tensor:
    """The whole memory of which a tensor is a view."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def gaps_untouched(ctx: Ctx, x: torch.Tensor) -> None:
    base = base_of(x)
    ctx.equal(int((base == -99).sum()), base.numel() - x.numel(), "elements around the view")


def layouts(ctx: Ctx) -> None:
    ranks = range(ctx.size)
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    for kind in LAYOUTS:
        parts = [p.reshape(12, 10) for p in ctx.inputs(torch.float32, 120)]
        views = [laid_out(kind, p) for p in parts]
        shape = views[0].shape
        wants = [p.reshape(shape) for p in parts]
        total = arith.reduced("SUM", wants)

        def blank(kind: str = kind) -> torch.Tensor:
            return laid_out(kind, torch.zeros(12, 10))

        for name in ("all_reduce", "reduce", "broadcast", "all_gather", "all_to_all", "send"):
            if ctx.skips(f"layout/{name}"):
                continue
            with ctx.case(f"layout/{name}/{kind}"):
                x = laid_out(kind, parts[ctx.rank])
                if name == "all_reduce":
                    dist.all_reduce(x)
                    ctx.same(x, total)
                elif name == "reduce":
                    dist.reduce(x, 1)
                    ctx.same(x, total if ctx.rank == 1 else wants[ctx.rank])
                elif name == "broadcast":
                    dist.broadcast(x, 1)
                    ctx.same(x, wants[1])
                elif name == "all_gather":
                    outs = [blank() for _ in ranks]
                    dist.all_gather(outs, x)
                    for out, want in zip(outs, wants, strict=True):
                        ctx.same(out, want)
                elif name == "all_to_all":
                    outs = [blank() for _ in ranks]
                    dist.all_to_all(outs, [x for _ in ranks])
                    for out, want in zip(outs, wants, strict=True):
                        ctx.same(out, want)
                else:
                    out = blank()
                    works = [dist.isend(x, right), dist.irecv(out, left)]
                    for work in works:
                        work.wait()
                    ctx.same(out, wants[left])
                if kind in ("strided", "offset", "column"):
                    gaps_untouched(ctx, x)


def strided_tensors_of_scatter_and_gather(ctx: Ctx) -> None:
    ranks = range(ctx.size)
    parts = [p.reshape(12, 10) for p in ctx.inputs(torch.float32, 120)]
    x = laid_out("transposed", parts[ctx.rank])
    with ctx.case("gather"):
        outs = [laid_out("strided", torch.zeros(12, 10)) for _ in ranks]
        dist.gather(x, outs if ctx.rank == 0 else None, 0)
        for out, want in zip(outs if ctx.rank == 0 else [], parts, strict=False):
            ctx.same(out, want)
    with ctx.case("scatter"):
        out = laid_out("column", torch.zeros(12, 10))
        ins = [laid_out("strided", p) for p in parts]
        dist.scatter(out, ins if ctx.rank == 0 else None, 0)
        ctx.same(out, parts[ctx.rank])
    with ctx.case("reduce_scatter"):
        out = laid_out("strided", torch.zeros(12, 10))
        dist.reduce_scatter(out, [laid_out("transposed", parts[ctx.rank]) for _ in ranks])
        ctx.same(out, arith.reduced("SUM", parts))
    with ctx.case("all_gather_into_tensor"):
        out = torch.zeros(10, 12 * ctx.size).t()
        dist.all_gather_into_tensor(out, x)
        ctx.same(out, torch.cat(parts))
    with ctx.case("reduce_scatter_tensor"):
        out = laid_out("transposed", torch.zeros(12, 10))
        wide = torch.cat([parts[ctx.rank]] * ctx.size).t().contiguous().t()
        dist.reduce_scatter_tensor(out, wide)
        ctx.same(out, arith.reduced("SUM", parts))
    with ctx.case("all_to_all_single"):
        whole = ctx.inputs(torch.float32, (ctx.size, 6))
        out = torch.zeros(6, ctx.size).t()
        dist.all_to_all_single(out, whole[ctx.rank].t().contiguous().t())
        ctx.same(out, torch.stack([w[ctx.rank] for w in whole]))


def expanded_everywhere(ctx: Ctx) -> None:
    """All ranks pass an expanded tensor."""
    for root in range(ctx.size):
        x = (torch.arange(3.0) + 10 * ctx.rank).expand(2, 3)
        dist.broadcast(x, root)
        ctx.same(x, (torch.arange(3.0) + 10 * root).expand(2, 3), "broadcast")
        x = torch.full((1,), float(ctx.rank)).expand(4)
        dist.reduce(x, root)
        if ctx.rank == root:
            ctx.same(x, torch.full((4,), float(sum(range(ctx.size)))), "reduce")


def degenerate(ctx: Ctx) -> None:
    ranks = range(ctx.size)
    for shape in ((), (0,), (3, 0, 2), (1, 1, 1)):
        parts = ctx.inputs(torch.float32, shape)
        with ctx.case(f"all_reduce {shape}"):
            x = parts[ctx.rank].clone()
            dist.all_reduce(x)
            ctx.same(x, arith.reduced("SUM", parts))
        with ctx.case(f"broadcast {shape}"):
            x = parts[ctx.rank].clone()
            dist.broadcast(x, 1)
            ctx.same(x, parts[1])
        with ctx.case(f"all_gather {shape}"):
            outs = [torch.zeros(shape) for _ in ranks]
            dist.all_gather(outs, parts[ctx.rank])
            for out, part in zip(outs, parts, strict=True):
                ctx.same(out, part)
        with ctx.case(f"send {shape}"):
            out = torch.zeros(shape)
            work = dist.isend(parts[ctx.rank], (ctx.rank + 1) % ctx.size)
            dist.recv(out, (ctx.rank - 1) % ctx.size)
            work.wait()
            ctx.same(out, parts[ctx.rank - 1])
    with ctx.case("all_gather_into_tensor of scalars"):
        if not ctx.skips("all_gather_into_tensor/scalars"):
            out = torch.zeros(ctx.size)
            dist.all_gather_into_tensor(out, torch.tensor(float(ctx.rank)))
            ctx.same(out, torch.arange(ctx.size, dtype=torch.float32))
