"""A process makes a context only on the GPU that it uses, whichever thread of mycoll or of the user
does the work. Each context takes half a gigabyte of the GPU's memory."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from jobs.contexts import contexts
from worlds.device_tensors import NUMEL, captured_all_reduce, full, is_all, total
from worlds.threads import on_all
from worlds.worker import Ctx


def everything(ctx: Ctx) -> None:
    x = full(ctx, ctx.rank + 1)
    dist.all_reduce(x)
    is_all(ctx, x, total(ctx))
    out = full(ctx, 0, ctx.size * NUMEL)
    dist.all_gather_into_tensor(out, x, async_op=True).wait()
    is_all(ctx, out, total(ctx))
    works = [dist.all_reduce(full(ctx, 1), async_op=True) for _ in range(5)]
    for work in works:
        work.wait()
    peer = 1 - ctx.rank
    ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, full(ctx, 0), peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    y = full(ctx, 0, 3 << 20)
    (dist.isend if ctx.rank == 0 else dist.irecv)(y, peer).wait()
    dist.barrier()
    group = dist.new_group()
    dist.all_reduce(x, group=group)
    dist.all_gather_object([None] * ctx.size, ctx.rank, group=group)
    dist.destroy_process_group(group)


def in_a_thread(ctx: Ctx) -> list[int]:
    """Runs everything in a thread that never set a device, so that the first one is current."""
    on_all(lambda _: everything(ctx), 1)
    dist.destroy_process_group()
    return contexts(ctx)


def a_death_under_replay(ctx: Ctx) -> list[int]:
    """The watchdog queries the streams of graphs; the first GPU is current on its thread, too."""
    x, graph = captured_all_reduce(ctx)
    graph.replay()
    torch.accelerator.synchronize()
    dist.barrier()
    if ctx.rank == 0:
        time.sleep(1)  # the other rank replays meanwhile
        os.kill(os.getpid(), signal.SIGKILL)
    with ctx.raises(dist.DistBackendError, "rank 0"):
        graph.replay()
        x[0].item()
    return contexts(ctx)


@pytest.mark.usefixtures("graphs")
def test_no_context_on_another_gpu_after_a_death(fresh_device_world, request):
    if request.config.getoption("--device") == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    world = fresh_device_world(2, "nccl")
    world.start(a_death_under_replay)
    assert world.finish(allow_gone=True)[1] == [1]


@pytest.mark.parametrize("path", ["nccl", "host"])
def test_no_context_on_another_gpu(fresh_device_world, path, request):
    if request.config.getoption("--device") == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    for rank, found in enumerate(fresh_device_world(2, path).run(in_a_thread)):
        assert found == [rank]
