"""Device tensors and streams: what an operation waits for, what waits for it, and how long memory
lives. On the stand-in device a mistake in any of these gives wrong results or aborts the
process."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from jobs.streams import after_the_current_stream, host_does_not_wait
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import arith
from worlds.device_tensors import NUMEL, full, here, is_all, slow, total, warm_up
from worlds.worker import Ctx

SOON = 20.0  # seconds

# --- order


@pytest.mark.worlds(3)
def test_order_on_the_current_stream(device_world):
    device_world.run(after_the_current_stream)


@pytest.mark.worlds(1, 2, paths=["nccl"])
def test_the_host_does_not_wait(device_world):
    device_world.run(host_does_not_wait)


def side_by_side(ctx: Ctx) -> None:
    """An async operation that waits for its peers does not block the caller's stream."""
    warm_up(ctx)
    store = ctx.store("side by side")
    x, y = full(ctx, ctx.rank + 1), full(ctx, 0)
    if ctx.rank == 0:
        work = dist.all_reduce(x, async_op=True)
        y.fill_(7)
        here(ctx).synchronize()  # although the other ranks have not called yet
        is_all(ctx, y, 7)
        ctx.equal(work.is_completed(), False, "completed without the others")
        store.set("go", "")
    else:
        store.wait(["go"], timedelta(seconds=30))
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    is_all(ctx, x, total(ctx))


@pytest.mark.worlds(3)
def test_async_work_beside_the_current_stream(device_world):
    device_world.run(side_by_side)


def read_on_another_stream(ctx: Ctx) -> None:
    warm_up(ctx)
    x = full(ctx, 0)
    x.fill_(ctx.rank + 1)
    work = dist.all_reduce(x, async_op=True)
    other = torch.Stream(device=ctx.device)
    before = here(ctx)
    torch.accelerator.set_stream(other)
    work.wait()
    is_all(ctx, x, total(ctx), "on another stream, after wait() there:")
    torch.accelerator.set_stream(before)
    work.wait()
    is_all(ctx, x, total(ctx), "and on the first one:")


def block_current_stream(ctx: Ctx) -> None:
    warm_up(ctx)
    x = full(ctx, ctx.rank + 1)
    work = dist.all_reduce(x, async_op=True)
    work.block_current_stream() if hasattr(work, "block_current_stream") else work.wait()
    is_all(ctx, x, total(ctx))


def works_end_unwaited(ctx: Ctx) -> None:
    x = full(ctx, ctx.rank + 1)
    work = dist.all_reduce(x, async_op=True)
    end = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.001)
    ctx.equal(work.is_completed(), True, "completed")
    if torch.__version__ >= "2.12":  # in earlier versions, torch's binding of it fails
        ctx.equal(work.exception() is None, True)
    work.wait()
    is_all(ctx, x, total(ctx))


def barrier_waits(ctx: Ctx) -> None:
    """After a barrier, all work that any rank enqueued before it is done."""
    warm_up(ctx)
    x = full(ctx, 0)
    slow(ctx)
    x.fill_(3)
    work = dist.all_reduce(x, async_op=True)
    dist.barrier()
    ctx.equal(here(ctx).query(), True, "the current stream is done")
    work.wait()
    is_all(ctx, x, 3 * ctx.size)


def barrier_waits_for_copies(ctx: Ctx) -> None:
    """The barrier also waits for an operation whose last copy is enqueued but not done."""
    warm_up(ctx)
    for _ in range(20):
        work = dist.all_reduce(full(ctx, 1), async_op=True)
        future = work.get_future()
        while not future.done():  # it is done when the copy is enqueued
            time.sleep(0.0001)
        dist.barrier()
        ctx.equal(work.is_completed(), True, "completed at the end of the barrier")


def chained_without_a_wait(ctx: Ctx) -> None:
    """Asynchronous operations of a group run in the order of their calls on the device, too."""
    warm_up(ctx)
    for _ in range(10):
        x = full(ctx, 1)
        works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
        works[-1].wait()
        is_all(ctx, x, ctx.size**3)
        for work in works[:-1]:
            work.wait()


def slow_callback(ctx: Ctx) -> None:
    """A callback of one result does not delay other results."""
    called = threading.Event()
    done = threading.Event()

    def callback(_: object) -> None:
        called.set()
        done.wait(SOON)

    x = full(ctx, 1)
    slow(ctx)  # a callback of a result that exists would run in its caller
    first = dist.all_reduce(x, async_op=True)
    chained = first.get_future_result().then(callback)
    ctx.equal(called.wait(SOON), True, "the callback is called")
    second = dist.all_reduce(full(ctx, 1), async_op=True)
    ctx.equal(second.get_future_result().wait(), 0, "result of the second")
    ctx.equal(chained.done(), False, "the callback is still running")
    done.set()
    chained.wait()


def futures(ctx: Ctx) -> None:
    """The value of a future, chained or not, is ordered on the current stream."""
    warm_up(ctx)
    x = full(ctx, ctx.rank + 1)
    value = dist.all_reduce(x, async_op=True).get_future().wait()
    is_all(ctx, value[0], total(ctx))
    y = full(ctx, ctx.rank + 1)
    chained = dist.all_reduce(y, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    is_all(ctx, chained.wait(), 2 * total(ctx), "chained:")
    for _ in range(20):
        z = full(ctx, ctx.rank + 1)
        work = dist.all_reduce(z, async_op=True)
        future = work.get_future()
        work.wait()
        ctx.equal(future.done(), True, "done with its work")
        is_all(ctx, future.value()[0], total(ctx))


JOBS = (
    read_on_another_stream,
    block_current_stream,
    works_end_unwaited,
    barrier_waits,
    barrier_waits_for_copies,
    chained_without_a_wait,
    slow_callback,
    futures,
)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
@pytest.mark.worlds(2)
def test_waiting(device_world, job):
    device_world.run(job)


# --- lifetimes


def usage(ctx: Ctx) -> dict[str, int]:
    gc.collect()
    torch.accelerator.synchronize()
    if ctx.device.type == "standin":
        torch.standin.verify()
        return torch.standin.counts()
    return {"live_bytes": torch.cuda.memory_allocated(ctx.device), "recorded_uses": 0}


def dropped_tensors(ctx: Ctx, is_waited: bool) -> None:
    """The memory of tensors and works that are dropped lives as long as needed, and not longer."""
    warm_up(ctx)
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    before = usage(ctx)

    def once(i: int) -> None:
        x = full(ctx, i)
        work = dist.all_reduce(x, async_op=True)
        outs = [full(ctx, 0) for _ in range(ctx.size)]
        gather = dist.all_gather(outs, full(ctx, i), async_op=True)
        out = full(ctx, 0)
        ops = [
            dist.P2POp(dist.isend, full(ctx, i), right),
            dist.P2POp(dist.irecv, out, left),
        ]
        works = [work, gather, *(dist.batch_isend_irecv(ops) if ctx.size > 1 else [])]
        if is_waited:
            for each in works:
                each.wait()
            is_all(ctx, x, i * ctx.size)
            is_all(ctx, outs[-1], i)
            if ctx.size > 1:
                is_all(ctx, out, i)

    for i in range(20):
        once(i)
        garbage = [full(ctx, -1) for _ in range(4)]  # reuses memory that was freed too early
        del garbage
    dist.barrier()
    end = time.monotonic() + 5
    after = usage(ctx)
    # The memory of operations without a wait() is freed without another call.
    while after["live_bytes"] > before["live_bytes"] and time.monotonic() < end:
        time.sleep(0.05)
        after = usage(ctx)
    kept = (after["live_bytes"] - before["live_bytes"]) / full(ctx, 0).nbytes
    ctx.equal(kept <= 8, True, f"after 20 rounds, {kept} more tensors are alive than before:")
    ctx.equal(after["recorded_uses"], before["recorded_uses"], "calls of record_stream")


@pytest.mark.parametrize("is_waited", [True, False], ids=["waited", "unwaited"])
@pytest.mark.worlds(1, 3)
def test_dropped_tensors(device_world, is_waited):
    device_world.run(dropped_tensors, is_waited)


def waited_on_another_stream(ctx: Ctx) -> None:
    """wait() on a stream that is not the tensor's own; then the tensor is freed."""
    warm_up(ctx)
    other = torch.Stream(device=ctx.device)
    before = here(ctx)
    for i in range(10):
        x = full(ctx, i)
        work = dist.all_reduce(x, async_op=True)
        torch.accelerator.set_stream(other)
        work.wait()
        y = x + 1
        torch.accelerator.set_stream(before)
        before.wait_stream(other)  # the caller must do that: x is freed in the order of `before`
        del x, work
        with_garbage = full(ctx, -1)
        del with_garbage
        is_all(ctx, y, i * ctx.size + 1)
    usage(ctx)


def dropped_before_a_wait_on_another_stream(ctx: Ctx) -> None:
    """The input is dropped before wait(), so only the operation keeps its memory alive."""
    warm_up(ctx)
    other = torch.Stream(device=ctx.device)
    for _ in range(10):
        slow(ctx)
        out = full(ctx, 0, NUMEL * ctx.size)
        work = dist.all_gather_into_tensor(out, full(ctx, ctx.rank + 1), async_op=True)
        with other:
            work.wait()
        del work
        full(ctx, -1)  # at the same address, if that is free
        here(ctx).wait_stream(other)
        for rank, part in enumerate(out.chunk(ctx.size)):
            is_all(ctx, part, rank + 1)
    usage(ctx)


@pytest.mark.parametrize(
    "job",
    [waited_on_another_stream, dropped_before_a_wait_on_another_stream],
    ids=lambda job: job.__name__,
)
@pytest.mark.worlds(2)
def test_freed_after_a_wait_on_another_stream(device_world, job):
    device_world.run(job)


DELAY = (("STANDIN_DELAY_US", "2000"),)


@pytest.mark.parametrize("path", ["nccl", "host"])
def test_with_delays(fresh_device_world, path):
    """The same jobs with a random delay before each task of each stream."""
    world = fresh_device_world(2, path, env=DELAY)
    for job in (after_the_current_stream, side_by_side, *JOBS, waited_on_another_stream, mixed):
        world.run(job)
    for is_waited in (True, False):
        world.run(dropped_tensors, is_waited)


# --- CPU and device tensors in one group


def mixed(ctx: Ctx) -> None:
    """CPU and device tensors interleaved, in the same order on all ranks, sync and async."""
    works = []
    for i in range(40):
        cpu, device = torch.full((100,), float(i)), full(ctx, i)
        works.append((cpu, dist.all_reduce(cpu, async_op=True), i))
        works.append((device, dist.all_reduce(device, async_op=True), i))
        if i % 5 == 0:
            now = torch.full((10,), float(i))
            dist.all_reduce(now)
            is_all(ctx, now, i * ctx.size, "a CPU tensor in between")
        if i % 7 == 0:
            now = full(ctx, i)
            dist.all_reduce(now)
            is_all(ctx, now, i * ctx.size, "a device tensor in between")
    for tensor, work, i in reversed(works):
        work.wait()
        is_all(ctx, tensor, i * ctx.size)


def mixed_orders(ctx: Ctx) -> None:
    """CPU and device operations do not wait for each other: ranks may mix them differently."""
    for i in range(10):
        cpu, device = torch.full((100,), float(i)), full(ctx, i)
        pairs = [(cpu, ctx.rank % 2 == 0), (device, True), (cpu, ctx.rank % 2 == 1)]
        works = [dist.all_reduce(t, async_op=True) for t, isMine in pairs if isMine]
        for work in works:
            work.wait()
        is_all(ctx, cpu, i * ctx.size)
        is_all(ctx, device, i * ctx.size)


@pytest.mark.parametrize("job", [mixed, mixed_orders], ids=lambda job: job.__name__)
@pytest.mark.worlds(3)
def test_cpu_and_device_tensors(device_world, job):
    device_world.run(job)


# --- coalescing


def batches(ctx: Ctx) -> None:
    """batch_isend_irecv after slow work; the result is read immediately."""
    warm_up(ctx)
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    for i in range(5):
        x, out = full(ctx, 0), full(ctx, 0)
        slow(ctx)
        x.fill_(10 * i + ctx.rank)
        ops = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, out, left)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        is_all(ctx, out, 10 * i + left)


@pytest.mark.worlds(2, 3)
def test_batches(device_world):
    device_world.run(batches)


def mixed_batches(ctx: Ctx) -> None:
    """Messages of CPU and device tensors in one batch. The value of its future is ordered on the
    current stream, whichever part ends last."""
    warm_up(ctx)
    peer = 1 - ctx.rank
    for i in range(5):
        cpu, cpu_out = torch.full((5,), float(i)), torch.zeros(5)
        x, out = full(ctx, 0), full(ctx, -1)
        slow(ctx)
        x.fill_(i)
        ops = [
            dist.P2POp(dist.isend, cpu, peer),
            dist.P2POp(dist.irecv, cpu_out, peer),
            dist.P2POp(dist.isend, x, peer),
            dist.P2POp(dist.irecv, out, peer),
        ]
        (work,) = dist.batch_isend_irecv(ops)
        value = work.get_future().wait()
        ctx.equal(len(value), 4, "tensors")
        is_all(ctx, out + 0, i)
        is_all(ctx, cpu_out, i)
        work.wait()


@pytest.mark.worlds(2)
def test_the_future_of_a_mixed_batch(device_world):
    device_world.run(mixed_batches)


def operations_of_callbacks(ctx: Ctx, where: str) -> None:
    """Operations that a callback starts precede those that the program calls next, on all ranks."""
    warm_up(ctx)
    for i in range(10):
        a, b = full(ctx, 1), full(ctx, 10)
        first = full(ctx, 1) if where == "device" else torch.ones(5)

        def callback(_: object, a: torch.Tensor = a) -> torch.Tensor:
            if ctx.rank == 0:
                time.sleep(0.003)
            dist.all_reduce(a)
            return a

        chained = dist.all_reduce(first, async_op=True).get_future().then(callback)
        if ctx.rank == 1:
            time.sleep(0.003)
        work = dist.all_reduce(b, async_op=True)
        chained.wait()
        work.wait()
        torch.accelerator.synchronize()
        is_all(ctx, a, ctx.size, f"round {i}, the callback's")
        is_all(ctx, b, 10 * ctx.size, f"round {i}, the program's")


@pytest.mark.parametrize("where", ["cpu", "device"])
@pytest.mark.worlds(2)
def test_operations_of_callbacks(device_world, where):
    device_world.run(operations_of_callbacks, where)


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"the program's mode was called for {func}")


def under_a_mode(ctx: Ctx) -> None:
    """mycoll's own operators do not reach the program's dispatch modes."""
    backend = dist.group.WORLD._get_backend(ctx.device)
    x = full(ctx, ctx.rank)
    with Refusing():
        work = backend.send([x], 1, 0) if ctx.rank == 0 else backend.recv([x], 0, 0)
        work.wait()
    is_all(ctx, x, 0)


@pytest.mark.parametrize("path", ["nccl", "host"])
def test_a_message_under_a_dispatch_mode(fresh_device_world, path):
    fresh_device_world(2, path).run(under_a_mode)


# --- several devices of one rank


def two_devices(ctx: Ctx) -> None:
    """A rank may use more than one device with one group."""
    count = torch.accelerator.device_count()
    if count < 2:
        return
    second = torch.device(ctx.device.type, (ctx.device.index + 1) % count)
    for where in (ctx.device, second, ctx.device):
        x = arith.values(torch.float32, 100, 1).abs().to(where)
        dist.all_reduce(x)
        ctx.same(x, arith.values(torch.float32, 100, 1).abs() * ctx.size)


@pytest.mark.worlds(2)
def test_two_devices_of_one_rank(device_world):
    device_world.run(two_devices)


# --- threads that destroy the program's objects


def ends_of_tensors(ctx: Ctx) -> list[str]:
    """The names of the threads that drop the last reference to a tensor of an operation."""
    warm_up(ctx)
    names: set[str] = set()

    def note() -> None:
        names.add(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip())

    for _ in range(40):
        for _ in range(4):
            x = full(ctx, 1)
            weakref.finalize(x, note)
            work = dist.all_reduce(x, async_op=True)
            work.get_future().add_done_callback(lambda _: None)
            del x, work
        time.sleep(0.02)
    dist.barrier()
    return sorted(names)


@pytest.mark.parametrize("path", ["nccl", "host"])
def test_engine_threads_destroy_no_tensors(fresh_device_world, path):
    for names in fresh_device_world(2, path).run(ends_of_tensors):
        assert names and not {"mycoll", "mycoll-watchdog"} & set(names), names
