"""Device tensors under graph capture: recorded once, replayed repeatedly. The stand-in device
applies CUDA's rules: recorded work must not be queried or waited for on the host."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from worlds.device import graph_on
from worlds.device_tensors import NUMEL, Pool, full, here, is_all, slow, total, warm_up
from worlds.worker import Ctx, called

pytestmark = pytest.mark.usefixtures("graphs")


def captured(ctx: Ctx) -> None:
    """Collectives recorded once and replayed, sync and async, between other work."""
    warm_up(ctx)
    x, gathered = full(ctx, 0), full(ctx, 0, NUMEL * ctx.size)
    scattered, wide = full(ctx, 0), full(ctx, 0, NUMEL * ctx.size)
    for mode in ("sync", "async"):
        with ctx.case(mode):
            x.fill_(ctx.rank)
            here(ctx).synchronize()
            graph = graph_on(ctx.device)
            with graph.capture():
                x.add_(1)
                called(mode, dist.all_reduce, x)
                called(mode, dist.all_gather_into_tensor, gathered, x)
                wide.copy_(gathered)
                called(mode, dist.reduce_scatter_tensor, scattered, wide)
                kept = x + 1  # allocated by the graph
                called(mode, dist.broadcast, kept, 0)
            is_all(ctx, x, ctx.rank, "before the first replay:")
            graph.replay()
            is_all(ctx, x, total(ctx))
            is_all(ctx, gathered, total(ctx))
            is_all(ctx, scattered, total(ctx) * ctx.size)
            is_all(ctx, kept, total(ctx) + 1)
            x.fill_(0)
            graph.replay()
            graph.replay()
            is_all(ctx, x, (0 + 1) * ctx.size * ctx.size + ctx.size, "the third replay:")
            other = full(ctx, 1)
            dist.all_reduce(other)  # between replays, on the same communicator
            is_all(ctx, other, ctx.size)
            graph.reset()
    dist.barrier()


@pytest.mark.worlds(1, 2, paths=["nccl"])
def test_capture_and_replay(device_world):
    device_world.run(captured)


def no_registration(ctx: Ctx) -> None:
    """Registering memory is refused, because NCCL would allocate under the capture."""
    import mycoll

    warm_up(ctx)
    x = full(ctx, 1)
    pool = Pool(ctx.device, x.data_ptr(), 4096)
    graph = graph_on(ctx.device)
    with graph.capture():
        dist.all_reduce(x)
        with ctx.raises(ValueError, "register_mem_pool: it cannot be captured"):
            mycoll.register_mem_pool(pool)
    graph.replay()
    is_all(ctx, x, ctx.size)
    mycoll.register_mem_pool(pool)
    mycoll.deregister_mem_pool(pool)


@pytest.mark.worlds(2, paths=["nccl"])
def test_no_memory_is_registered_under_capture(device_world):
    device_world.run(no_registration)


def captured_while_watched(ctx: Ctx) -> None:
    """Earlier works are in flight, and watched by the watchdog, during a capture."""
    warm_up(ctx)
    tensors = [full(ctx, ctx.rank + 1) for _ in range(4)]
    slow(ctx)
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    x = full(ctx, ctx.rank + 1)
    graph = graph_on(ctx.device)
    with graph.capture():
        for _ in range(3):
            dist.all_reduce(x)
            time.sleep(0.15)  # the watchdog checks `works` meanwhile
    for work, t in zip(works, tensors, strict=True):
        work.wait()
        is_all(ctx, t, total(ctx))
    graph.replay()
    is_all(ctx, x, total(ctx) * ctx.size**2)
    graph.reset()


@pytest.mark.worlds(2, paths=["nccl"])
def test_the_watchdog_does_not_invalidate_a_capture(device_world):
    device_world.run(captured_while_watched)


def refused_under_capture(ctx: Ctx) -> None:
    x = full(ctx, 1)
    with ctx.raises((RuntimeError, ValueError), "captur"), graph_on(ctx.device).capture():
        dist.all_reduce(x)
    y = full(ctx, 1)
    dist.all_reduce(y)
    is_all(ctx, y, ctx.size, "after the refusal:")


@pytest.mark.worlds(2, paths=["host"])
def test_the_host_path_refuses_to_be_captured(device_world):
    device_world.run(refused_under_capture)


def works_of_a_capture(ctx: Ctx) -> None:
    """The methods of a Work under capture, where it is complete once it is recorded."""
    warm_up(ctx)
    x, y, z = full(ctx, 0), full(ctx, 0), full(ctx, 0)
    here(ctx).synchronize()
    graph = graph_on(ctx.device)
    with graph.capture():
        x.fill_(ctx.rank + 1)
        work = dist.all_reduce(x, async_op=True)
        work.wait(timedelta(seconds=20))
        ctx.equal((work.is_completed(), work.is_success()), (True, True))
        ctx.equal(work.get_future_result().wait(), 0, "result code")
        y.fill_(ctx.rank + 1)
        last = dist.all_reduce(y, async_op=True)
        z.fill_(ctx.rank + 1)  # concurrently with `last`
        dist.all_reduce(z, async_op=True).get_future().wait()
        time.sleep(0.1)  # gives the watchdog time to make a mistake
        last.wait()
        del work, last
    for _ in range(2):
        graph.replay()
        for tensor in (x, y, z):
            is_all(ctx, tensor, total(ctx))
    graph.reset()


@pytest.mark.worlds(2, paths=["nccl"])
def test_works_of_a_capture(device_world):
    device_world.run(works_of_a_capture)


def test_works_of_a_capture_that_wait_on_the_host(fresh_device_world):
    env = (("MYCOLL_CUDA_BLOCKING_WAIT", "1"),)
    fresh_device_world(2, "nccl", env=env).run(works_of_a_capture)


# --- messages


def captured_messages(ctx: Ctx) -> None:
    x, y = full(ctx, 0), full(ctx, 0)

    def message(tensor: torch.Tensor) -> dist.Work:
        return dist.isend(tensor, 1) if ctx.rank == 0 else dist.irecv(tensor, 0)

    work = message(y)
    if ctx.device.type == "cuda":  # CUDA does not let NCCL connect during a capture
        work.wait()
        torch.accelerator.synchronize()
        time.sleep(0.3)
    x.fill_(0)
    graph = graph_on(ctx.device)
    with graph.capture():
        if ctx.rank == 0:
            x.add_(1)
        message(x).wait()
    work.wait()
    for i in range(1, 4):
        graph.replay()
        is_all(ctx, x, i, f"replay {i}")
    graph.reset()


def test_captured_messages(fresh_device_world):
    fresh_device_world(2, "nccl").run(captured_messages)
