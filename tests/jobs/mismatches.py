"""Ranks that call different operations."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from worlds.worker import Ctx

SOON = 20.0  # seconds; far below the timeout of the group


class Mismatch(NamedTuple):
    one: Callable[[int], object]  # the call of rank 0, given the world's size
    others: Callable[[int], object]
    texts: tuple[str, ...]  # all of these must be in the message


def f32(numel: int) -> torch.Tensor:
    return torch.ones(numel)


RED = dist.ReduceOp
MISMATCHES: dict[str, Mismatch] = {
    "operation": Mismatch(
        lambda n: dist.all_reduce(f32(8)),
        lambda n: dist.broadcast(f32(8), 0),
        ("all_reduce", "broadcast"),
    ),
    "operation, large": Mismatch(
        lambda n: dist.all_reduce(f32(1_000_000)),
        lambda n: dist.broadcast(f32(1_000_000), 0),
        ("all_reduce", "broadcast"),
    ),
    "barrier against all_reduce": Mismatch(
        lambda n: dist.barrier(), lambda n: dist.all_reduce(f32(8)), ("barrier", "all_reduce")
    ),
    "gather against reduce": Mismatch(
        lambda n: dist.gather(f32(8), [f32(8) for _ in range(n)], dst=0),
        lambda n: dist.reduce(f32(8), 0),
        ("gather", "reduce"),
    ),
    "dtype": Mismatch(
        lambda n: dist.all_reduce(f32(8)), lambda n: dist.all_reduce(f32(8).int()), ("float", "int")
    ),
    "dtype of a broadcast": Mismatch(
        lambda n: dist.broadcast(f32(8), 1),
        lambda n: dist.broadcast(f32(8).double(), 1),
        ("float32", "float64"),
    ),
    "size": Mismatch(
        lambda n: dist.all_reduce(f32(1000)), lambda n: dist.all_reduce(f32(500)), ("1000", "500")
    ),
    "size, large": Mismatch(
        lambda n: dist.all_reduce(f32(1_000_000)),
        lambda n: dist.all_reduce(f32(7)),
        ("1000000", "7"),
    ),
    "size of an all_gather": Mismatch(
        lambda n: dist.all_gather_into_tensor(f32(100 * n), f32(100)),
        lambda n: dist.all_gather_into_tensor(f32(50 * n), f32(50)),
        ("all_gather",),
    ),
    "size of a reduce_scatter": Mismatch(
        lambda n: dist.reduce_scatter_tensor(f32(100), f32(100 * n)),
        lambda n: dist.reduce_scatter_tensor(f32(50), f32(50 * n)),
        ("reduce_scatter",),
    ),
    "reduce op": Mismatch(
        lambda n: dist.all_reduce(f32(8), op=RED.SUM),
        lambda n: dist.all_reduce(f32(8), op=RED.MAX),
        ("SUM", "MAX"),
    ),
    "sum of scaled inputs against a plain one": Mismatch(
        lambda n: dist.all_reduce(f32(8), op=dist._make_nccl_premul_sum(0.5)),
        lambda n: dist.all_reduce(f32(8), op=RED.SUM),
        ("all_reduce PREMUL_SUM float32", "all_reduce SUM float32"),
    ),
    "root": Mismatch(
        lambda n: dist.broadcast(f32(8), 0), lambda n: dist.broadcast(f32(8), 1), ("root",)
    ),
    "root of a reduce": Mismatch(
        lambda n: dist.reduce(f32(8), 0), lambda n: dist.reduce(f32(8), 1), ("root",)
    ),
    "async": Mismatch(
        lambda n: dist.all_reduce(f32(8), async_op=True).wait(),
        lambda n: dist.all_gather_into_tensor(f32(8 * n), f32(8), async_op=True).wait(),
        ("all_reduce", "all_gather"),
    ),
}


def disagree(ctx: Ctx, name: str) -> tuple[str, float]:
    """The error of this rank, and the time until it was raised."""
    mismatch = MISMATCHES[name]
    call = mismatch.one if ctx.rank == 0 else mismatch.others
    started = time.monotonic()
    text = ""
    try:
        # A valid call first. On a slow rank it may still run when the others fail.
        dist.all_reduce(torch.ones(4))
        call(ctx.size)
        dist.barrier()  # e.g. a broadcast may complete here before the root detects the mismatch
    except dist.DistBackendError as error:
        text = str(error)
    return text, time.monotonic() - started
