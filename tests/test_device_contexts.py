"""A process makes a context on the GPU that it uses and on no other, whatever thread of ours or of
the user's does the work: each takes half a gigabyte of the GPU's memory."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from jobs.contexts import contexts
from worlds.device_tensors import NUMEL, captured_all_reduce, full, is_all, total
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


def in_a_thread(ctx: Ctx) -> list[int]:
    """That never chose a device: the first one is current there."""
    failures: list[BaseException] = []

    def body() -> None:
        try:
            everything(ctx)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    for failure in failures:
        raise failure
    dist.destroy_process_group()
    return contexts(ctx)


def a_death_under_replay(ctx: Ctx) -> list[int]:
    """The watchdog asks for the streams of graphs: on its thread, too, the first GPU is current."""
    x, graph = captured_all_reduce(ctx)
    graph.replay()
    torch.accelerator.synchronize()
    dist.barrier()
    if ctx.rank == 0:
        time.sleep(1)  # the other one replays by then
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
