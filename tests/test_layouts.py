"""Tensors that are not one dense run of memory, tiny ones and huge ones."""

from __future__ import annotations

import warnings

import pytest
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
    """All of the memory that a tensor is a view of."""
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


@pytest.mark.worlds(3)
def test_layouts(world):
    world.run(layouts)


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


@pytest.mark.worlds(3)
def test_strided_tensors_of_scatter_and_gather(world):
    world.run(strided_tensors_of_scatter_and_gather)


def expanded_inputs(ctx: Ctx) -> None:
    """One element seen many times: fine to read from, meaningless to write to."""
    ranks = range(ctx.size)
    want = [torch.full((5, 7), float(r)) for r in ranks]
    x = torch.tensor(float(ctx.rank)).expand(5, 7)
    with ctx.case("all_gather"):
        outs = [torch.zeros(5, 7) for _ in ranks]
        dist.all_gather(outs, x)
        for out, w in zip(outs, want, strict=True):
            ctx.same(out, w)
    with ctx.case("send"):
        out = torch.zeros(5, 7)
        work = dist.isend(x, (ctx.rank + 1) % ctx.size)
        dist.recv(out, (ctx.rank - 1) % ctx.size)
        work.wait()
        ctx.same(out, want[ctx.rank - 1])
    with ctx.case("broadcast from it"):
        y = x if ctx.rank == 0 else torch.ones(5, 7)
        dist.broadcast(y, 0)
        ctx.same(y, want[0])
    with ctx.case("all_to_all_single"):
        out = torch.zeros(ctx.size, 4)
        dist.all_to_all_single(out, torch.tensor(float(ctx.rank)).expand(ctx.size, 4))
        ctx.same(out, torch.stack([torch.full((4,), float(r)) for r in ranks]))


@pytest.mark.worlds(3)
def test_expanded_inputs(world):
    world.run(expanded_inputs)


def expanded_in_place(ctx: Ctx) -> None:
    """The gradient of a sum is such a tensor: one element, seen many times."""
    total = sum(range(ctx.size))
    weight = torch.ones(5, 7, requires_grad=True)
    (gradient,) = torch.autograd.grad((weight.sum() * ctx.rank), weight)
    ctx.equal(gradient.stride(), (0, 0))
    for mode in ("sync", "async"):
        with ctx.case(f"all_reduce {mode}"):
            x = gradient.clone()[0, 0].expand(5, 7)
            work = dist.all_reduce(x, async_op=mode == "async")
            if work:
                work.wait()
            ctx.same(x, torch.full((5, 7), float(total)))
    with ctx.case("some dimensions, from a part of its memory"):
        rows = torch.arange(14.0).reshape(2, 7) + ctx.rank
        x = rows[:, 1:5].unsqueeze(1).expand(2, 3, 4)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        want = (torch.arange(14.0).reshape(2, 7) + ctx.size - 1)[:, 1:5]
        ctx.same(x, want.unsqueeze(1).expand(2, 3, 4))
    with ctx.case("all_reduce_coalesced"):
        several = [torch.full((1,), float(ctx.rank + i)).expand(4) for i in range(3)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.all_reduce_coalesced([*several, torch.ones(2)])
        for i, x in enumerate(several):
            ctx.same(x, torch.full((4,), float(total + i * ctx.size)))


@pytest.mark.worlds(2, 3)
def test_expanded_in_place(world):
    world.run(expanded_in_place)


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


@pytest.mark.worlds(1, 2, 3)
def test_zero_elements_and_zero_dimensions(world):
    if world.size == 1:
        world.run(degenerate_alone)
    else:
        world.run(degenerate)


def degenerate_alone(ctx: Ctx) -> None:
    for shape in ((), (0,), (3, 0, 2)):
        x = torch.ones(shape)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        ctx.same(x, torch.ones(shape))


def larger_than_4_gib(ctx: Ctx) -> None:
    numel = (1 << 32) + 4099
    x = torch.zeros(numel, dtype=torch.uint8)
    marks = [0, 1 << 31, (1 << 32) - 1, 1 << 32, numel - 1]
    for i, at in enumerate(marks):
        x[at] = ctx.rank + i
    dist.all_reduce(x)
    for i, at in enumerate(marks):
        ctx.equal(int(x[at]), sum(r + i for r in range(ctx.size)), f"sum at {at}")
    ctx.equal(int(torch.count_nonzero(x)), len(marks), "non-zero elements")
    x[numel - 2] = 7 if ctx.rank == 0 else 1
    dist.broadcast(x, 0)
    ctx.equal(int(x[numel - 2]), 7, "broadcast")
    if ctx.rank == 0:
        x[numel - 3] = 9
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
        ctx.equal(int(x[numel - 3]), 9, "recv")


@pytest.mark.large
@pytest.mark.worlds(2)
def test_larger_than_4_gib(world):
    world.run(larger_than_4_gib, deadline=600)
