"""Collectives that move data without changing it: every dtype, every size, sync and async."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from jobs.moves import JOBS
from worlds import arith
from worlds.worker import Ctx


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
@pytest.mark.worlds(1, 2, 3, 5, tcp=(3,))
def test_moves(world, job):
    world.run(job)


# --- every dtype


def any_dtypes() -> list[torch.dtype]:
    """All dtypes of tensors that can be made and whose bytes can be written."""
    found = []
    for name in sorted(dir(torch)):
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype) or dtype in found:
            continue
        try:
            if made(dtype, 4, 0).is_quantized:
                continue  # torch has no operators for these
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        found.append(dtype)
    return found


def made(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return arith.values(dtype, numel, seed)
    return arith.random_bytes(dtype, (numel,), generator)


def same_bytes(ctx: Ctx, got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    if not torch.equal(arith.raw(got), arith.raw(want)):
        ctx.fail(f"{what}: wrong bytes")


def every_dtype(ctx: Ctx) -> list[str]:
    dtypes = any_dtypes()
    numel = 261
    ranks = range(ctx.size)
    for dtype in dtypes:
        name = f"every dtype/{arith.short(dtype)}/move"
        if ctx.skips(name):
            continue
        parts = [made(dtype, numel, r) for r in ranks]
        mine = parts[ctx.rank]
        with ctx.case(f"{name}/broadcast"):
            x = made(dtype, numel, ctx.rank)
            dist.broadcast(x, 1)
            same_bytes(ctx, x, parts[1], "broadcast")
        with ctx.case(f"{name}/all_gather"):
            outs = [made(dtype, numel, 99) for _ in ranks]
            dist.all_gather(outs, mine)
            for r in ranks:
                same_bytes(ctx, outs[r], parts[r], f"all_gather from {r}")
        with ctx.case(f"{name}/send"):
            out = made(dtype, numel, 99)
            work = dist.isend(mine, (ctx.rank + 1) % ctx.size)
            dist.recv(out, (ctx.rank - 1) % ctx.size)
            work.wait()
            same_bytes(ctx, out, parts[ctx.rank - 1], "recv")
        with ctx.case(f"{name}/gather"):
            outs = [made(dtype, numel, 99) for _ in ranks] if ctx.rank == 0 else None
            dist.gather(mine, outs, 0)
            for r, out in enumerate(outs or ()):
                same_bytes(ctx, out, parts[r], f"gather from {r}")
        with ctx.case(f"{name}/scatter"):
            out = made(dtype, numel, 99)
            dist.scatter(out, parts if ctx.rank == 0 else None, 0)
            same_bytes(ctx, out, parts[ctx.rank], "scatter")
        with ctx.case(f"{name}/all_to_all"):
            outs = [made(dtype, numel, 99) for _ in ranks]
            dist.all_to_all(outs, [made(dtype, numel, 10 * ctx.rank + d) for d in ranks])
            for r in ranks:
                same_bytes(ctx, outs[r], made(dtype, numel, 10 * r + ctx.rank), f"from {r}")
    return [arith.short(dtype) for dtype in dtypes]


@pytest.mark.worlds(2, 3, tcp=(3,))
def test_every_dtype_can_be_moved(world):
    covered = set(world.run(every_dtype)[0])
    assert {arith.short(d) for d in arith.REDUCIBLE} <= covered
    assert {"complex32", "float8_e8m0fnu"} <= covered


def quantized(ctx: Ctx) -> None:
    """torch has no operators for these, with any backend; mycoll's error names an alternative."""
    x = torch.quantize_per_tensor(torch.ones(4), 0.5, 3, torch.quint8)
    with ctx.raises((NotImplementedError, RuntimeError), "QuantizedCPU"):
        dist.broadcast(x, 0)
    if ctx.setup.family != "mycoll":
        return
    group = dist.distributed_c10d._get_default_group()
    with ctx.raises(ValueError, "must not be quantized, but it is QUInt8; pass its int_repr"):
        group._get_backend(torch.device("cpu")).broadcast([x], dist.BroadcastOptions())


@pytest.mark.worlds(1)
def test_quantized_tensors_are_refused(world):
    world.run(quantized)
