"""all_reduce, reduce, reduce_scatter and their kin: right numbers, and the same bits everywhere."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from worlds import arith
from worlds.worker import Ctx, called

SIZES = (0, 1, 3, 17, 1000, 4099)
FACTORS = (0.5, 3.0, -1.25, 2.0, 0.125)  # exact in every float dtype
PREMUL_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def premul_sum(factor: float | torch.Tensor) -> dist.ReduceOp:
    return dist._make_nccl_premul_sum(factor)


def matrix(ctx: Ctx, function: str):
    """(name, mode, dtype, op, numel) of every case of the matrix; sync and async take turns."""
    turn = 0
    for dtype in arith.REDUCIBLE:
        for numel in SIZES:
            for op in arith.ops_of(dtype):
                turn += 1
                name = f"{function}/{op}/{arith.short(dtype)}/{numel}"
                if not ctx.skips(name):
                    yield name, ("sync", "async")[turn % 2], dtype, op, numel


# --- all_reduce


def all_reduce_cases(ctx: Ctx) -> str:
    for name, mode, dtype, op, numel in matrix(ctx, "all_reduce"):
        with ctx.case(f"{name}/{mode}"):
            parts = ctx.inputs(dtype, numel)
            x = parts[ctx.rank].clone()
            called(mode, dist.all_reduce, x, op=arith.reduce_op(op))
            ctx.same(x, arith.reduced(op, parts))
            ctx.digest(x)
    return ctx.digests()


@pytest.mark.worlds(1, 2, 3, 4, 5, tcp=(3,))
def test_all_reduce_matrix(world):
    digests = world.run(all_reduce_cases)
    assert len(set(digests)) == 1, f"ranks hold different bits: {digests}"


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
        for mode in ("sync", "async"):
            with ctx.case(f"{name}/{mode}"):
                parts = ctx.inputs(dtype, numel, seed=numel)
                x = parts[ctx.rank].clone()
                called(mode, dist.all_reduce, x)
                ctx.same(x, arith.reduced("SUM", parts))
                ctx.digest(x)
    return ctx.digests()


@pytest.mark.worlds(2, 3, 5, tcp=(5,))
def test_all_reduce_big(world):
    assert len(set(world.run(all_reduce_big))) == 1


def test_transports_agree(pool):
    """The bits do not depend on how they travelled."""
    transports = ("",) if pool.options.backend == "gloo" else ("shm", "tcp")
    digests = {
        digest
        for transport in transports
        for job in (all_reduce_digest,)
        for digest in pool.get(pool.spec(4, transport)).run(job)
    }
    assert len(digests) == 1


def all_reduce_digest(ctx: Ctx) -> str:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for numel in (1, 5, 1000, 65_537, 600_011):
            x = ctx.inputs(dtype, numel, seed=5)[ctx.rank]
            dist.all_reduce(x)
            ctx.digest(x)
    return ctx.digests()


def embedded(ctx: Ctx) -> None:
    """The same values inside larger tensors, at several places, give the same bits."""
    numel = 1000
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        small = ctx.inputs(dtype, numel, seed=2)[ctx.rank]
        alone = small.clone()
        dist.all_reduce(alone)
        for total in (1003, 20_000, 262_144, 1_000_003):
            for start in (0, 1, total // 2 - 3, total - numel):
                start = max(0, min(start, total - numel))
                with ctx.case(f"{dtype} of {total} at {start}"):
                    x = torch.ones(total, dtype=dtype)
                    x[start : start + numel] = small
                    dist.all_reduce(x)
                    ctx.same(x[start : start + numel], alone)
                    ctx.equal(bool((x[:start] == ctx.size).all()), True, "the ones around")


@pytest.mark.worlds(3, 5, tcp=(3,))
def test_bits_do_not_depend_on_message_size(world):
    world.run(embedded)


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


@pytest.mark.worlds(2, 3, tcp=(3,))
def test_nan_and_infinity(world):
    world.run(nan_cases)


def narrow_cases(ctx: Ctx) -> None:
    """Sums that a narrow accumulator gets wrong, and ones that leave the range of the dtype."""
    for dtype, big, small in (
        (torch.float16, 2048.0, 1.0),
        (torch.bfloat16, 256.0, 1.0),
        (torch.float8_e4m3fn, 16.0, 1.0),
        (torch.float8_e5m2, 8.0, 1.0),
    ):
        name = f"narrow/{arith.short(dtype)}"
        if ctx.skips(name):
            continue
        with ctx.case(name):
            parts = [torch.full((33,), big if r == 0 else small).to(dtype) for r in range(ctx.size)]
            x = parts[ctx.rank].clone()
            dist.all_reduce(x)
            want = torch.full((33,), big + (ctx.size - 1) * small).to(dtype)
            ctx.same(x, want)
        with ctx.case(f"{name}/overflow"):
            top = torch.full((5,), torch.finfo(dtype).max, dtype=dtype)
            parts = [top.clone() for _ in range(ctx.size)]
            x = parts[ctx.rank].clone()
            dist.all_reduce(x)
            ctx.same(x, arith.reduced("SUM", parts))
            y = top.clone()
            dist.all_reduce(y, op=dist.ReduceOp.AVG)
            # bfloat16 reaches as far as the float that it is added in: there the sum is infinite.
            ctx.same(y, arith.reduced("AVG", parts), "AVG of the largest number")


@pytest.mark.worlds(4, 5, tcp=(5,))
def test_narrow_floats_are_accumulated_wide(world):
    world.run(narrow_cases)


def integer_average(ctx: Ctx) -> None:
    for dtype in arith.SIGNED:
        with ctx.case(f"AVG/{arith.short(dtype)}"):
            x = torch.tensor([-1, 1, -7, 7, 100], dtype=dtype)
            if ctx.rank:
                x.zero_()
            dist.all_reduce(x, op=dist.ReduceOp.AVG)
            want = [int(v / ctx.size) for v in (-1, 1, -7, 7, 100)]
            ctx.same(x, torch.tensor(want, dtype=dtype), "truncates toward zero:")


@pytest.mark.worlds(2, 3, tcp=(3,))
def test_integer_average_truncates(world):
    world.run(integer_average)


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


@pytest.mark.worlds(2, 4, tcp=(4,))
def test_premul_sum(world):
    world.run(premul_cases)


# --- reduce


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
                ctx.same(x, parts[ctx.rank], "a rank that is not the root: untouched:")


@pytest.mark.worlds(1, 2, 3, 5, tcp=(3,))
def test_reduce_matrix(world):
    world.run(reduce_cases)


def reduce_big(ctx: Ctx) -> None:
    for root in range(ctx.size):
        parts = ctx.inputs(torch.float32, 1_000_003, seed=root)
        x = parts[ctx.rank].clone()
        dist.reduce(x, root)
        if ctx.rank == root:
            ctx.same(x, arith.reduced("SUM", parts), f"root {root}")
        elif not ctx.skips("reduce/untouched"):
            ctx.same(x, parts[ctx.rank], "a rank that is not the root: untouched:")


@pytest.mark.worlds(2, 3, 4, tcp=(3,))
def test_reduce_big(world):
    world.run(reduce_big)


# --- reduce_scatter


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


@pytest.mark.worlds(1, 2, 3, 5, tcp=(3,))
def test_reduce_scatter_matrix(world):
    world.run(reduce_scatter_cases)


def reduce_scatter_uneven(ctx: Ctx) -> None:
    for dtype in (torch.float32, torch.float16, torch.int64):
        for base in (0, 3, 1000, 70_001):
            for mode in ("sync", "async"):
                with ctx.case(f"{arith.short(dtype)}/{base}/{mode}"):
                    sizes = [base + 7 * r if r != 1 else 0 for r in range(ctx.size)]
                    chunks = [
                        [arith.values(dtype, sizes[d], 100 * s + d) for d in range(ctx.size)]
                        for s in range(ctx.size)
                    ]
                    y = torch.zeros(sizes[ctx.rank], dtype=dtype)
                    called(mode, dist.reduce_scatter, y, chunks[ctx.rank])
                    ctx.same(y, arith.reduced("SUM", [c[ctx.rank] for c in chunks]))


@pytest.mark.worlds(2, 3, 5, tcp=(3,))
def test_reduce_scatter_uneven(world):
    world.run(reduce_scatter_uneven)


def reduce_scatter_big(ctx: Ctx) -> None:
    numel = 200_003
    parts = ctx.inputs(torch.float32, (ctx.size, numel))
    if not ctx.skips("reduce_scatter_tensor/stacked"):
        y = torch.empty(numel)
        dist.reduce_scatter_tensor(y, parts[ctx.rank])
        ctx.same(y, arith.reduced("SUM", [p[ctx.rank] for p in parts]), "stacked")
    x = parts[ctx.rank].reshape(-1)  # the output may be a slice of the input
    out = x[ctx.rank * numel : (ctx.rank + 1) * numel]
    want = arith.reduced("SUM", [p[ctx.rank] for p in ctx.inputs(torch.float32, (ctx.size, numel))])
    dist.reduce_scatter_tensor(out, x)
    ctx.same(out, want, "in place")


@pytest.mark.worlds(2, 3, 4, tcp=(3,))
def test_reduce_scatter_big_and_in_place(world):
    world.run(reduce_scatter_big)
