"""Tensors that are not contiguous, tiny ones and huge ones."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from jobs.layouts import (
    degenerate,
    expanded_everywhere,
    layouts,
    strided_tensors_of_scatter_and_gather,
)
from worlds.worker import Ctx


@pytest.mark.worlds(3)
def test_layouts(world):
    world.run(layouts)


@pytest.mark.worlds(3)
def test_strided_tensors_of_scatter_and_gather(world):
    world.run(strided_tensors_of_scatter_and_gather)


def expanded_inputs(ctx: Ctx) -> None:
    """Tensors whose elements share memory can be read, but not written."""
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
    """Expanded tensors such as the gradient of a sum, whose elements are all the same one."""
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
    with ctx.case("reduce"):
        for op in (dist.ReduceOp.SUM, dist._make_nccl_premul_sum(1.0)):
            x = torch.full((1,), float(ctx.rank)).expand(4)
            dist.reduce(x if ctx.rank != 1 else x.clone(), 0, op)
            if ctx.rank == 0:
                ctx.same(x, torch.full((4,), float(total)))
    with ctx.case("all_reduce_coalesced"):
        several = [torch.full((1,), float(ctx.rank + i)).expand(4) for i in range(3)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.all_reduce_coalesced([*several, torch.ones(2)])
        for i, x in enumerate(several):
            ctx.same(x, torch.full((4,), float(total + i * ctx.size)))


@pytest.mark.worlds(2, 3)
def test_expanded_everywhere(world):
    world.run(expanded_everywhere)


def interleaved(ctx: Ctx) -> None:
    """Views whose rows interleave without sharing elements."""
    total = float(sum(range(ctx.size)))
    for shape, strides in (((3, 2), (2, 3)), ((4, 3), (6, 4)), ((2, 3, 2), (9, 5, 3))):
        memory = torch.full((40,), -99.0)
        x = memory.as_strided(shape, strides).fill_(ctx.rank)
        dist.all_reduce(x)
        ctx.same(x, torch.full(shape, total), "all_reduce")
        dist.broadcast(x.fill_(ctx.rank), 1)
        ctx.same(x, torch.ones(shape), "broadcast")
        ctx.equal(int((memory == -99).sum()), 40 - x.numel(), "elements around the view")
    for x in (torch.zeros(40).as_strided((5, 4), (3, 4)), torch.zeros(9).unfold(0, 3, 2)):
        with ctx.raises(ValueError, "share memory"):
            dist.all_reduce(x)


@pytest.mark.worlds(2)
def test_views_that_interleave(world, mycoll_only):
    world.run(interleaved)


def cut_anywhere(ctx: Ctx) -> None:
    """Without splits, all_to_all_single needs parts of equal size, not rows."""
    for shape in ((1, 2 * ctx.size), (ctx.size + 1, ctx.size), (2 * ctx.size,)):
        x = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100 * ctx.rank
        out = torch.zeros(shape)
        dist.all_to_all_single(out, x)
        part = x.numel() // ctx.size
        mine = torch.arange(float(part)) + ctx.rank * part
        want = torch.cat([mine + 100 * rank for rank in range(ctx.size)])
        ctx.same(out, want.reshape(shape))


@pytest.mark.worlds(1, 3)
def test_all_to_all_single_without_rows(world):
    world.run(cut_anywhere)


@pytest.mark.worlds(2, 3)
def test_expanded_in_place(world):
    world.run(expanded_in_place)


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


def lazy_bits(ctx: Ctx) -> None:
    """Direct calls of the backend pass lazy conj() and neg(), which torch's dispatcher resolves."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    counts = torch.arange(1, 7, dtype=torch.int32).reshape(2, 3)
    numbers = torch.complex(counts.double(), -counts.double())
    views = {
        "conj": lambda x: x.conj(),
        "neg": torch._neg_view,
        "transposed": lambda x: x.conj().t(),
        "both": lambda x: torch._neg_view(x.conj()),
    }
    for name, view in views.items():
        given = counts if name == "neg" else numbers
        with ctx.case(name):
            base = given.clone() if ctx.rank == 0 else torch.zeros_like(given)
            x = view(base)
            backend.broadcast([x], dist.BroadcastOptions()).wait()
            ctx.same(x.resolve_conj().resolve_neg(), view(given).resolve_conj().resolve_neg())
            ctx.same(base, given)


@pytest.mark.worlds(2)
def test_lazy_bits(world, mycoll_only):
    world.run(lazy_bits)


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
