"""barrier and monitored_barrier."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from jobs.barriers import barriers
from worlds.worker import Ctx

pytestmark = pytest.mark.transports("shm")

ERRORS = (RuntimeError, dist.DistBackendError)


@pytest.mark.worlds(1, 2, 3, 5, tcp=(3,))
def test_barrier(world):
    world.run(barriers)


def barrier_is_in_order(ctx: Ctx) -> None:
    """A barrier behind async work waits for the work of all ranks, but completes."""
    tensors = [torch.ones(10_000) for _ in range(10)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    dist.barrier()
    for work in works:
        work.wait()
    for t in tensors:
        ctx.equal(float(t[0]), float(ctx.size))


@pytest.mark.worlds(2, 3)
def test_barrier_behind_async_work(world):
    world.run(barrier_is_in_order)


def monitored(ctx: Ctx) -> None:
    for _ in range(3):
        dist.monitored_barrier()
        dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)
    x = torch.ones(1)
    dist.all_reduce(x)
    ctx.equal(x.item(), ctx.size)


@pytest.mark.worlds(1, 2, 4, tcp=(4,))
def test_monitored_barrier(world):
    world.run(monitored)


def monitored_in_a_group(ctx: Ctx) -> None:
    group = dist.new_group([1, 2])
    if ctx.rank:
        dist.monitored_barrier(group=group)
        dist.destroy_process_group(group)


@pytest.mark.worlds(3)
def test_monitored_barrier_in_a_group(world):
    world.run(monitored_in_a_group)


def some_missing(ctx: Ctx, missing: list[int], wait_all: bool) -> str:
    if ctx.rank in missing:
        ctx.store("missing").wait(["seen"], timedelta(seconds=30))
        return ""
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=2), wait_all_ranks=wait_all)
    except ERRORS as error:
        return str(error)
    finally:
        if ctx.rank == 0:
            time.sleep(0.5)  # so that the other ranks raise their own error first
            ctx.store("missing").set("seen", "")
    return ""


@pytest.mark.parametrize("wait_all", [False, True])
@pytest.mark.transports("shm", "tcp")
def test_monitored_barrier_names_missing_ranks(reused, transport, wait_all):
    texts = reused(4, transport).run_in_group(some_missing, [1, 3], wait_all)
    named = {rank for rank in (1, 3) if str(rank) in texts[0].split("monitoredBarrier")[0]}
    assert named == {1, 3} if wait_all else named, texts[0]
    assert "2" not in texts[0].split("monitoredBarrier")[0].split("rank")[-1], texts[0]


@pytest.mark.parametrize("missing", [[1], [2]])
def test_monitored_barrier_names_one_missing_rank(reused, transport, missing):
    text = reused(3, transport).run_in_group(some_missing, missing, True)[0]
    assert f"Ranks {missing[0]} failed to pass monitoredBarrier" in text, text
