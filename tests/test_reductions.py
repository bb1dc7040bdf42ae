"""all_reduce, reduce and reduce_scatter in all forms: correct results, and equal bits on all
ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from jobs.reductions import (
    all_reduce_big,
    all_reduce_cases,
    integer_average,
    nan_cases,
    premul_cases,
    premul_sum,
    reduce_cases,
    reduce_scatter_big,
    reduce_scatter_cases,
    reduce_scatter_uneven,
)
from torch.distributed.distributed_c10d import _coalescing_manager
from worlds import arith
from worlds.worker import Ctx

# --- all_reduce


@pytest.mark.worlds(1, 2, 3, 4, 5, tcp=(3,))
def test_all_reduce_matrix(world):
    digests = world.run(all_reduce_cases)
    assert len(set(digests)) == 1, f"ranks hold different bits: {digests}"


@pytest.mark.worlds(2, 3, 5, tcp=(5,))
def test_all_reduce_big(world):
    assert len(set(world.run(all_reduce_big))) == 1


def test_transports_agree(pool):
    """The bits do not depend on the transport."""
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
            # The sum of bfloat16 is infinite, because float32 has the same range.
            ctx.same(y, arith.reduced("AVG", parts), "AVG of the largest number")


@pytest.mark.worlds(4, 5, tcp=(5,))
def test_narrow_floats_are_accumulated_wide(world):
    world.run(narrow_cases)


@pytest.mark.worlds(2, 3, tcp=(3,))
def test_integer_average_truncates(world):
    world.run(integer_average)


@pytest.mark.worlds(2, 4, tcp=(4,))
def test_premul_sum(world):
    world.run(premul_cases)


def refused_in_a_bucket(ctx: Ctx) -> None:
    """Multiplying by the factor would change the dtype."""
    tensors = [torch.ones(1000, dtype=torch.int8) for _ in range(8)]
    with pytest.raises(ValueError, match="PREMUL_SUM is for"):
        dist.all_reduce_coalesced(tensors, premul_sum(2.5))
    with pytest.raises(ValueError, match="PREMUL_SUM is for"), _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor, premul_sum(2.5))
    dist.all_reduce(tensors[0])
    ctx.equal(tensors[0].unique().tolist(), [ctx.size])


@pytest.mark.filterwarnings("ignore:.*all_reduce_coalesced:FutureWarning")
@pytest.mark.worlds(2)
def test_premul_sum_of_integers_is_refused(world, mycoll_only):
    world.run(refused_in_a_bucket)


# --- reduce


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
            ctx.same(x, parts[ctx.rank], "a rank that is not the root is unchanged:")


@pytest.mark.worlds(2, 3, 4, tcp=(3,))
def test_reduce_big(world):
    world.run(reduce_big)


# --- reduce_scatter


@pytest.mark.worlds(1, 2, 3, 5, tcp=(3,))
def test_reduce_scatter_matrix(world):
    world.run(reduce_scatter_cases)


@pytest.mark.worlds(2, 3, 5, tcp=(3,))
def test_reduce_scatter_uneven(world):
    world.run(reduce_scatter_uneven)


@pytest.mark.worlds(2, 3, 4, tcp=(3,))
def test_reduce_scatter_big_and_in_place(world):
    world.run(reduce_scatter_big)


def sums_of_complex_halves(ctx: Ctx) -> None:
    n = ctx.size
    x = torch.complex(torch.arange(3.0), torch.full((3,), ctx.rank + 1.0)).to(torch.complex32)
    imaginary = torch.full((3,), n * (n + 1) / 2)
    want = torch.complex(torch.arange(3.0) * n, imaginary).to(torch.complex32)
    out = torch.empty_like(x)
    dist.reduce_scatter(out, [x] * n)
    ctx.same(torch.view_as_real(out), torch.view_as_real(want))
    if not ctx.gloo:
        dist.reduce_scatter_tensor(out, torch.cat([x] * n), dist.ReduceOp.AVG)
        average = torch.complex(torch.arange(3.0), imaginary / n).to(torch.complex32)
        ctx.same(torch.view_as_real(out), torch.view_as_real(average))
        with ctx.raises(ValueError, "op PRODUCT is not defined for tensors of ComplexHalf"):
            dist.reduce_scatter(out, [x] * n, dist.ReduceOp.PRODUCT)


@pytest.mark.worlds(2, 3)
def test_sums_of_complex_halves(world):
    world.run(sums_of_complex_halves)
