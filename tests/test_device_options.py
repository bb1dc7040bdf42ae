"""Further features of groups with device tensors: memory of NCCL, hooks, methods of a Work,
environment variables; and groups whose NCCL fails or whose ranks are configured differently."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import fsdp
from jobs.forks import calls_of_work, refused_in_a_child
from jobs.hooks import engines_log, helper_threads, hooks_that_raise
from standins import accelerator
from standins import cuda as standin_cuda
from worlds import device, training
from worlds.device_tensors import NUMEL, Pool, full, here, is_all, warm_up
from worlds.worker import Ctx

PATHS = ("nccl", "host")
ERRORS = (RuntimeError, ValueError)


# --- memory


def memory(ctx: Ctx) -> None:
    import mycoll
    from mycoll import _C

    warm_up(ctx)
    is_nccl = ctx.setup.path.startswith("nccl")
    allocator = ctypes.CDLL(_C.__file__)
    allocator.mycoll_nccl_alloc.restype = ctypes.c_void_p
    allocator.mycoll_nccl_alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    allocator.mycoll_nccl_free.argtypes = [ctypes.c_void_p, *allocator.mycoll_nccl_alloc.argtypes]
    allocator.mycoll_nccl_free.restype = None
    size = 1 << 21
    address = allocator.mycoll_nccl_alloc(size, ctx.device.index, None)
    ctx.equal(allocator.mycoll_nccl_alloc(0, ctx.device.index, None), None, "no bytes")
    if is_nccl:
        ctx.equal(address is not None, True, "memory from NCCL")
    pool = Pool(ctx.device, address or 4096, size)
    for symmetric in (False, True):
        mycoll.register_mem_pool(pool, symmetric=symmetric)
        mycoll.register_mem_pool(pool, symmetric=symmetric)  # registers what was added
        if is_nccl:
            with ctx.raises(ValueError, "registered already"):
                mycoll.register_mem_pool(pool, symmetric=not symmetric)
        x = full(ctx, ctx.rank)
        dist.all_reduce(x)
        is_all(ctx, x, sum(range(ctx.size)))
        mycoll.deregister_mem_pool(pool)
        if is_nccl:
            with ctx.raises(ValueError, "not registered with the group"):
                mycoll.deregister_mem_pool(pool)
        backend = dist.group.WORLD._get_backend(ctx.device)
        backend.register_mem_pool(pool, symm=symmetric)
        backend.deregister_mem_pool(pool)
    if address is not None:
        allocator.mycoll_nccl_free(address, size, ctx.device.index, None)


@pytest.mark.worlds(2)
def test_memory_for_nccl(device_world):
    device_world.run(memory)


def memory_by_torchs_names(ctx: Ctx) -> None:
    """The methods of the backend that programs written for torch's nccl use."""
    backend = dist.group.WORLD._get_backend(ctx.device)
    ctx.equal(backend.supports_tensor_alloc(ctx.device), False, "before the path is chosen")
    with ctx.raises(ValueError, "no communicator of NCCL's on the current device"):
        backend._comm_ptr()
    warm_up(ctx)
    is_nccl = ctx.setup.path.startswith("nccl")
    if is_nccl:
        rank = ctypes.c_int(-1)
        device.nccl(ctx.device.type).ncclCommUserRank(
            ctypes.c_void_p(backend._comm_ptr()), ctypes.byref(rank)
        )
        ctx.equal(rank.value, ctx.rank, "in the communicator")
        if hasattr(torch._C._distributed_c10d, "_register_external_nccl_comm"):
            from torch.distributed._symmetric_memory import _nccl

            name = dist.group.WORLD.group_name
            with _nccl.register_external_nccl_comm(name, backend._comm_ptr(), ctx.device):
                pass
    else:
        with ctx.raises(ValueError, "no communicator of NCCL's on the current device"):
            backend._comm_ptr()
    pool = Pool(ctx.device, full(ctx, 1).data_ptr(), 4096)
    backend.register_mem_pool(pool)
    backend.deregister_mem_pool(pool)
    if is_nccl:
        with ctx.raises(ValueError, "not registered with the group"):
            backend.deregister_mem_pool(pool)
    can = backend.supports_tensor_alloc(ctx.device)
    ctx.equal(can, is_nccl and ctx.device.type == "cuda", "memory to give")
    if not can:
        with ctx.raises(ValueError, "has no memory of NCCL's"):
            backend.allocate_tensor(10, dtype=torch.float32, device=ctx.device)
        return
    tensors = []
    for numel in (10, 0, 1 << 20, 10 << 20):
        x = backend.allocate_tensor(numel, dtype=torch.float32, device=ctx.device)
        ctx.equal((x.shape, x.dtype, x.device), ((numel,), torch.float32, ctx.device))
        tensors.append(x.fill_(ctx.rank))
        dist.all_reduce(x)
    for x in tensors:
        is_all(ctx, x, sum(range(ctx.size)))
    own = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(own):
        y = full(ctx, ctx.rank, 1 << 20)
    backend.register_mem_pool(own)
    dist.all_reduce(y)
    is_all(ctx, y, sum(range(ctx.size)))
    backend.deregister_mem_pool(own)
    with ctx.device:
        net = fsdp.sharded(training.model())
        net.set_allocate_memory_from_process_group_for_comm(True)
        training.train(net, [ctx.rank])
        training.compare(ctx, net, training.reference(ctx))


@pytest.mark.parametrize("path", PATHS)
def test_memory_by_torchs_names(fresh_device_world, path):
    fresh_device_world(2, path).run(memory_by_torchs_names)


def test_memory_without_windows(fresh_device_world):
    env = (("STANDIN_NCCL", "window=none"),)
    fresh_device_world(2, "nccl", env=env).run(memory)


def registers_late(ctx: Ctx) -> None:
    """Registration ends by the group's current timeout, although NCCL takes longer."""
    import mycoll

    warm_up(ctx)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
    x = full(ctx, 1)
    torch.standin.sleep(6_000_000)  # NCCL waits for the device
    started = time.monotonic()
    with ctx.raises(ERRORS, "ncclCommRegister timed out"):
        mycoll.register_mem_pool(Pool(ctx.device, x.data_ptr(), 4096))
    took = time.monotonic() - started
    ctx.equal(1.0 < took < 5.0, True, f"{took:.1f} s")
    with ctx.raises(ERRORS, "ncclCommRegister timed out"):
        dist.all_reduce(x)


def test_registering_ends_by_the_groups_timeout(fresh_device_world, standin):
    fresh_device_world(2, "nccl").run(registers_late)


# --- hooks, works


def hooks(ctx: Ctx) -> None:
    group = dist.new_group()
    seen: list[str] = []
    group._register_on_completion_hook(lambda info: seen.append(info.op_type.name))
    x = full(ctx, 1)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group, async_op=True)
    out = full(ctx, 0, NUMEL * ctx.size)
    dist.all_gather_into_tensor(out, x, group=group)
    group._wait_for_pending_works()
    ctx.equal(sorted(seen), ["ALLREDUCE", "ALLREDUCE", "_ALLGATHER_BASE"])
    seen.clear()
    ring = [
        dist.P2POp(dist.isend, x, group=group, group_peer=(ctx.rank + 1) % ctx.size),
        dist.P2POp(dist.irecv, full(ctx, 0), group=group, group_peer=(ctx.rank - 1) % ctx.size),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    group._wait_for_pending_works()
    ctx.equal(seen, ["COALESCED"], "a batch")
    if ctx.setup.path.startswith("nccl"):
        with ctx.raises(ERRORS, "beyond NCCL"):
            dist.all_reduce(x.to(torch.int16), group=group)
        group._wait_for_pending_works()  # does not wait for the call that was refused
    dist.destroy_process_group(group)


def changed_from_another_thread(ctx: Ctx) -> None:
    """Sets timeout, timing and hook while calls run; for the thread sanitizer."""
    x, y = full(ctx, 1, 10), torch.ones(10)
    for _ in range(5):
        group = dist.new_group()
        backends = [group._get_backend(where) for where in (torch.device("cpu"), ctx.device)]
        seen: list[str] = []
        stop = threading.Event()

        def change(group=group, backends=backends, seen=seen, stop=stop) -> None:
            group._register_on_completion_hook(lambda info: seen.append(info.op_type.name))
            while not stop.is_set():
                for seconds in (60, 61):
                    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
                group._enable_collectives_timing()
                for backend in backends:
                    ctx.equal(backend.options._timeout.seconds in (60, 61), True)

        thread = threading.Thread(target=change)
        thread.start()
        for _ in range(40):
            works = [dist.all_reduce(each, group=group, async_op=True) for each in (x, y)]
            for each in (x, y):
                dist.broadcast(each, 0, group=group)
            for work in works:
                work.wait()
        stop.set()
        thread.join()
        group._wait_for_pending_works()
        ctx.equal({"ALLREDUCE", "BROADCAST"} >= set(seen), True, f"{set(seen)}")
        dist.destroy_process_group(group)


@pytest.mark.worlds(2)
def test_changes_from_another_thread(device_world):
    device_world.run(changed_from_another_thread)


def wrapped_allocator(ctx: Ctx) -> None:
    """Another library's allocator forwards to mycoll's; then a scope of shared tensors is
    reopened."""
    import mycoll
    from mycoll import _C

    for round_ in range(3):
        with mycoll.shared_tensors():
            shared = torch.ones(1000)
        plain = torch.ones(1000)
        for tensor, wanted in ((shared, True), (plain, False)):
            is_shared = _C._is_shared_memory(tensor.data_ptr(), tensor.nbytes)
            ctx.equal(is_shared, wanted, f"round {round_}")
        if round_ < 2:
            accelerator.wrap_cpu_allocator()


def test_a_wrapped_allocator(fresh_device_world, standin):
    fresh_device_world(1, "host").run(wrapped_allocator)


def callback_that_throws(ctx: Ctx) -> None:
    """An exception of a callback in C++ ends neither the process nor the group."""
    left, right = (ctx.rank - 1) % ctx.size, (ctx.rank + 1) % ctx.size
    x = torch.zeros(3)
    work = dist.irecv(x, left)
    accelerator.throw_after(work)
    with engines_log(1) as lines:
        dist.barrier()  # no rank receives anything before it
        dist.send(torch.ones(3), right)
        work.wait()
        end = time.monotonic() + 20
        while not lines() and time.monotonic() < end:
            time.sleep(0.01)
        found = lines()
    ctx.equal(len(found), 1, f"{found}")
    ctx.equal("a callback of a future has failed after RECV: a callback in C++" in found[0], True)
    dist.all_reduce(x)


@pytest.mark.worlds(2)
def test_a_callback_that_throws(device_world, standin):
    device_world.run(callback_that_throws)


def future_of_rows(ctx: Ctx) -> None:
    """The result is a list of tensors for each rank, as on the CPU."""
    mine = [full(ctx, ctx.rank), full(ctx, 10 + ctx.rank)]
    rows = [[full(ctx, -1) for _ in mine] for _ in range(ctx.size)]
    found = dist.all_gather_coalesced(rows, mine, async_op=True).wait()
    ctx.equal([len(row) for row in found], [2] * ctx.size)
    for rank, (first, second) in enumerate(found):
        is_all(ctx, first, rank)
        is_all(ctx, second, 10 + rank)


@pytest.mark.worlds(2)
def test_a_future_of_rows(device_world):
    device_world.run(future_of_rows)


def completions(ctx: Ctx) -> None:
    """A hook is called once for each Work that has succeeded, on the device and on the CPU."""
    for where in (ctx.device, torch.device("cpu")):
        group = dist.new_group()
        backend = group._get_backend(where)
        x = torch.ones(1000, device=where)
        dist.all_reduce(x, group=group)
        counted = accelerator.count_completions(backend, 1)
        again = accelerator.count_completions(backend, 2)
        works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(3)]
        with dist._coalescing_manager(group, x.device, async_ops=True) as block:
            for _ in range(2):
                dist.all_reduce(x, group=group)
        if ctx.rank == 0:
            works.append(dist.isend(x, 1, group=group))
        else:
            works.append(dist.irecv(x, 0, group=group))
        keys = {accelerator.completion_key(work) for work in works}
        ctx.equal(len(keys), len(works), "different keys")
        for work in (*works, block):
            work.wait()
        if where.type != "cpu":
            torch.accelerator.synchronize()
        end = time.monotonic() + 20
        while not keys <= counted()[0].keys() and time.monotonic() < end:
            time.sleep(0.01)
        found, timed = counted()
        ctx.equal({key: found.get(key) for key in keys}, dict.fromkeys(keys, 1), f"{where}")
        ctx.equal(timed, 0, "durations, without timing")
        ctx.equal(keys <= again()[0].keys(), True, "the second hook")

        backend._enable_collectives_timing()
        work = dist.all_reduce(x, group=group, async_op=True)
        work.wait()
        while not counted()[1] and time.monotonic() < end:
            time.sleep(0.01)
        ctx.equal(counted()[1], 1, "durations, with timing")

        dist.barrier()
        if ctx.rank == 0:  # the other rank makes no call
            time.sleep(0.2)  # until the parts of the block are counted
            total = sum(counted()[0].values())
            accelerator.abort_work(dist.all_reduce(x, group=group, async_op=True))
            time.sleep(0.2)
            ctx.equal(sum(counted()[0].values()), total, "a failure is no completion")
        dist.barrier()
        with ctx.raises(RuntimeError, "Work.abort"):
            for _ in range(2):
                dist.all_reduce(x, group=group)
                torch.accelerator.synchronize()


def test_completion_hooks(fresh_device_world, standin):
    if torch.__version__ < "2.15":
        pytest.skip("torch has them since 2.15")
    for path in PATHS:
        fresh_device_world(2, path).run(completions)


@pytest.mark.worlds(2)
def test_hooks_that_raise(device_world):
    device_world.run(hooks_that_raise, (ValueError,))


def hooks_of_what_fails(ctx: Ctx) -> None:
    """Hooks are also called for operations that fail, with an unknown duration."""
    seen: list[float] = []
    group = dist.new_group()
    group._register_on_completion_hook(lambda info: seen.append(info.active_duration))
    x = full(ctx, 1)
    dist.all_reduce(x, group=group)
    torch.accelerator.synchronize()
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    if ctx.rank == 0:
        with ctx.raises(RuntimeError, "rank 1"):
            dist.all_reduce(x, group=group, async_op=True).wait(timedelta(seconds=30))
        group._wait_for_pending_works()
        ctx.equal(len(seen), 2)
    ctx.store("failed").set(str(ctx.rank), "")
    ctx.store("failed").wait(["0", "1"], timedelta(seconds=30))


def test_hooks_of_what_fails(fresh_device_world):
    fresh_device_world(2, "nccl").run(hooks_of_what_fails)


def hooks_beside_a_broken_device(ctx: Ctx) -> None:
    """The device fails between the end of an operation and the query of its duration."""
    seen: list[float] = []
    group = dist.distributed_c10d._get_default_group()
    group._register_on_completion_hook(lambda info: seen.append(info.active_duration))
    warm_up(ctx)
    group._wait_for_pending_works()  # the watchdog makes no further queries
    for _ in range(5):
        work = dist.all_reduce(full(ctx, 1), async_op=True)
        while not work.is_completed():  # when it is, the device is not queried for that again
            pass
        device.break_device("an illegal memory access")
        time.sleep(0.05)
        device.break_device("")
        torch.accelerator.synchronize()
    group._wait_for_pending_works()
    ctx.equal(len(seen), 6)


@pytest.mark.parametrize("path", PATHS)
def test_hooks_beside_a_broken_device(fresh_device_world, scripted, path):
    fresh_device_world(2, path).run(hooks_beside_a_broken_device)


MANY = 3000  # hundreds are in flight at a time


def hooks_of_many(ctx: Ctx) -> None:
    """Hooks and futures of many operations that end concurrently are all called."""
    group = dist.new_group()
    seen: list[int] = []
    group._register_on_completion_hook(lambda info: seen.append(info.seq))
    x = full(ctx, 0, 10)
    works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(MANY)]
    results = [work.get_future_result() for work in works]
    group._wait_for_pending_works()
    ctx.equal(len(seen), MANY, "hooks")
    end = time.monotonic() + 20
    while not all(result.done() for result in results) and time.monotonic() < end:
        time.sleep(0.01)
    ctx.equal(sum(result.done() for result in results), MANY, "futures that are done")
    dist.destroy_process_group(group)


def work_methods(ctx: Ctx) -> None:
    x = full(ctx, ctx.rank)
    work = dist.all_reduce(x, async_op=True)
    ctx.equal(work.get_future_result().wait(), 0, "result code")
    ctx.equal((work.is_completed(), work.is_success()), (True, True))
    (result,) = work.result()
    ctx.equal(result.data_ptr(), x.data_ptr(), "result()")
    work.synchronize()
    is_all(ctx, x, sum(range(ctx.size)))


def cpp_methods_of_works(ctx: Ctx) -> None:
    """Sequence numbers and abort() of works on the device and on the CPU."""
    standin = accelerator.load()
    for where in (ctx.device, torch.device("cpu")):
        group = dist.new_group()
        x = torch.ones(10, device=where)
        numbers = []
        for _ in range(3):
            work = dist.all_reduce(x, group=group, async_op=True)
            numbers.append(standin.sequence_of(work))
            work.wait()
        # mycoll's own collectives, which connect the ranks' devices, are not counted.
        ctx.equal(numbers, [0, 1, 2], f"numbers, {where}")
        all_numbers: list[Any] = [None] * ctx.size
        dist.all_gather_object(all_numbers, numbers)
        ctx.equal(all_numbers, [numbers] * ctx.size, f"equal on all ranks, {where}")
        if ctx.rank == 0:  # the other rank makes no call
            work = dist.all_reduce(x, group=group, async_op=True)
            standin.abort_work(work)
        with ctx.raises(RuntimeError, "Work.abort"):
            for _ in range(2):
                dist.all_reduce(x, group=group)
                torch.accelerator.synchronize()


def test_cpp_methods_of_works(fresh_device_world, standin):
    for path in PATHS:
        fresh_device_world(2, path).run(cpp_methods_of_works)


def profiled(ctx: Ctx) -> None:
    # NVIDIA's part of the profiler needs a driver.
    only = [torch.profiler.ProfilerActivity.CPU] if standin_cuda.is_here() else None
    with torch.profiler.profile(activities=only) as profile:
        dist.all_reduce(full(ctx, 1))
        dist.all_reduce(full(ctx, 1), async_op=True).wait()
        torch.accelerator.synchronize()
    names = [event.key for event in profile.key_averages()]
    ctx.equal("mycoll:all_reduce" in names, True, f"{names}")


@pytest.mark.parametrize(
    "job", [hooks, hooks_of_many, work_methods, profiled], ids=lambda job: job.__name__
)
@pytest.mark.worlds(2)
def test_works(device_world, job):
    device_world.run(job)


@pytest.mark.worlds(2)
def test_helper_threads(device_world):
    device_world.run(helper_threads)


# --- waiting


def extended_batch(ctx: Ctx) -> None:
    """An ephemeral timeout applies until the first batch after it has ended."""
    exchange = dist.irecv if ctx.rank == 0 else dist.isend
    x, y, message = (full(ctx, ctx.rank) for _ in range(3))
    for each in (x, y):
        dist.all_reduce(each)
    exchange(message, 1 - ctx.rank).wait()
    torch.accelerator.synchronize()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), dist.group.WORLD)
    dist.group.WORLD._get_backend(ctx.device)._add_ephemeral_timeout(timedelta(seconds=30))
    if ctx.rank == 1:
        time.sleep(1)
    with dist._coalescing_manager(device=ctx.device, async_ops=True) as block:
        for each in (x, y):
            dist.all_reduce(each)
    work = exchange(message, 1 - ctx.rank)  # not ordered after the batch
    block.wait()
    work.wait()
    is_all(ctx, x, ctx.size * sum(range(ctx.size)))
    is_all(ctx, message, 1)


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "_add_ephemeral_timeout"), reason="torch has it since 2.14"
)
@pytest.mark.parametrize("path", PATHS)
def test_an_extended_batch(fresh_device_world, path):
    fresh_device_world(2, path).run(extended_batch)


def waits_with_timeout(ctx: Ctx, how: str) -> None:
    """The operation continues after a wait that ends early."""
    warm_up(ctx)
    store = ctx.store(f"waits {how}")
    x = full(ctx, ctx.rank)
    if ctx.rank == 0:
        work = dist.all_reduce(x, async_op=True)
        if how == "timeout":
            with ctx.raises(RuntimeError, "the operation is still running"):
                work.wait(timedelta(seconds=0.3))
        else:

            def interrupt(*_: Any) -> None:
                raise InterruptedError("enough")

            before = signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with ctx.raises(InterruptedError, "enough"):
                work.wait(timedelta(seconds=30))
            signal.signal(signal.SIGALRM, before)
        store.set("go", "")
    else:
        store.wait(["go"], timedelta(seconds=30))
        work = dist.all_reduce(x, async_op=True)
    work.wait(timedelta(seconds=30))
    is_all(ctx, x, sum(range(ctx.size)))


@pytest.mark.parametrize("how", ["timeout", "signal"])
@pytest.mark.worlds(2)
def test_a_wait_that_ends_early(device_world, how):
    device_world.run(waits_with_timeout, how)


def waits_on_the_host(ctx: Ctx) -> None:
    """With MYCOLL_CUDA_BLOCKING_WAIT, operations are complete on return, for any stream."""
    warm_up(ctx)
    here, other = torch.accelerator.current_stream(ctx.device), torch.Stream(device=ctx.device)
    for mode in ("sync", "async"):
        x = full(ctx, ctx.rank)
        if mode == "sync":
            dist.all_reduce(x)
        else:
            dist.all_reduce(x, async_op=True).wait()
        torch.accelerator.set_stream(other)
        is_all(ctx, x, sum(range(ctx.size)), mode)
        torch.accelerator.set_stream(here)


@pytest.mark.parametrize("path", PATHS)
def test_blocking_wait(fresh_device_world, path):
    env = (("MYCOLL_CUDA_BLOCKING_WAIT", "1"),)
    fresh_device_world(2, path, env=env).run(waits_on_the_host)


def another_timeout(ctx: Ctx) -> float:
    warm_up(ctx)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    store = ctx.store("another timeout")
    if ctx.rank == 1:
        store.wait(["done"], timedelta(seconds=40))
        return 2.0
    started = time.monotonic()
    with ctx.raises(RuntimeError, "rank 1"):
        dist.all_reduce(full(ctx, 1), async_op=True)
        while time.monotonic() < started + 30:
            time.sleep(0.05)
            dist.all_reduce(full(ctx, 1), async_op=True)
    store.set("done", "")
    return time.monotonic() - started


@pytest.mark.parametrize("path", PATHS)
def test_the_timeout_can_be_set(fresh_device_world, path):
    for took in fresh_device_world(2, path).run(another_timeout):
        assert 1.5 < took < 20, took


def forked(ctx: Ctx) -> None:
    """A forked child cannot use the group, and does not affect the parent."""
    warm_up(ctx)
    x = full(ctx, ctx.rank)
    works = {"a work": dist.all_reduce(x, async_op=True)}
    works["a work on the CPU"] = dist.all_reduce(torch.ones(3), async_op=True)
    calls: dict[str, Callable[[], object]] = {"all_reduce": lambda: dist.all_reduce(x)}
    for name in works:
        calls |= calls_of_work(name, works[name])
        calls[f"abort of {name}"] = functools.partial(accelerator.abort_work, works[name])
    refused_in_a_child(ctx, calls, works)
    for work in works.values():
        work.wait()
    is_all(ctx, x, sum(range(ctx.size)))


@pytest.mark.worlds(2)
def test_a_fork(device_world):
    if device_world.spec.device == "cuda":
        pytest.skip("CUDA does not survive a fork")
    device_world.run(forked)


# --- NCCL that fails, on the stand-in


def error_of_calls(ctx: Ctx) -> str:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    try:
        for _ in range(600):
            dist.all_reduce(full(ctx, 1), async_op=True)
            time.sleep(0.05)
    except ERRORS as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("script", "texts"),
    [
        ("fail=init", ["ncclCommInitRankConfig", "internal error", "NCCL 2."]),
        ("duplicate_gpu=1", ["Duplicate GPU detected"]),
        ("rank=1,hang=init", ["timed out", "ncclCommInitRankConfig"]),
        ("hang=connect", ["timed out", "ncclCommInitRankConfig"]),
        ("fail=enqueue", ["ncclAllReduce", "internal error", "rank "]),
        ("rank=1,error_after=2,error=1", ["unhandled cuda error", "rank 1"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_of_nccl(fresh_device_world, request, script, texts):
    on = request.config.getoption("--device")
    if on != "standin" and not device.is_scripted(on):
        pytest.skip("needs the stand-in for NCCL")
    world = fresh_device_world(2, "nccl", env=(("STANDIN_NCCL", script),))
    answers = world.run(error_of_calls)
    for text in texts:
        assert any(text.lower() in answer.lower() for answer in answers), answers
    assert all(answers), answers


def configured_differently(ctx: Ctx, variable: str, values: tuple[str, str], kind: str) -> str:
    os.environ[variable] = values[ctx.rank]
    ctx.init()
    try:
        x = full(ctx, 1)
        if kind == "collective":
            dist.all_reduce(x)
        else:
            (dist.send if ctx.rank == 0 else dist.recv)(x, 1 - ctx.rank)
    except ERRORS as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["collective", "message"])
@pytest.mark.parametrize(
    ("variable", "values", "text"),
    [
        ("MYCOLL_CUDA", ("nccl", "auto"), "MYCOLL_CUDA differs: it is nccl on rank 0 and auto"),
        ("STANDIN_NCCL", ("version=22801", "version=21903"), "NCCL differs: rank 0 has 2.28.1"),
        ("MYCOLL_NCCL_LIBRARY", ("/no/such/file", "/no/such/file"), "rank 0 has no NCCL"),
        ("STANDIN_BUS_ID", ("0000:3b:00.0", "0000:3b:00.0"), "rank 0 and rank 1 use the same GPU"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isupper() else "",
)
def test_ranks_that_are_configured_differently(
    fresh_device_world, scripted, variable, values, text, kind
):
    world = fresh_device_world(2, "nccl", init=False)
    for answer in world.run(configured_differently, variable, values, kind):
        assert answer.startswith("mycoll group '0': ") and text in answer, answer


def one_through_host_memory(ctx: Ctx) -> str:
    """The rank that has chosen host memory waits for no other rank."""
    os.environ["MYCOLL_CUDA"] = ("host", "auto")[ctx.rank]
    ctx.init()
    try:
        for source in (0, 1):
            (dist.send if ctx.rank == source else dist.recv)(full(ctx, 1), 1 - ctx.rank)
            here(ctx).synchronize()
    except ERRORS as error:
        return str(error)
    return ""


def test_messages_of_ranks_that_do_not_fit(fresh_device_world, scripted):
    world = fresh_device_world(2, "nccl", init=False)
    for answer in world.run(one_through_host_memory):
        assert "MYCOLL_CUDA differs: it is host on rank 0 and auto on rank 1" in answer, answer


def from_any_through_host_memory(ctx: Ctx) -> str:
    """The receiver has chosen host memory, and names no rank. The sender waits for its answer."""
    os.environ["MYCOLL_CUDA"] = ("host", "auto", "host")[ctx.rank]
    ctx.init()
    try:
        if ctx.rank == 0:
            for _ in range(2):
                dist.recv(full(ctx, 0))
        else:
            if ctx.rank == 1:
                dist.recv(torch.ones(1), 2)  # until rank 0 has received something
            dist.send(full(ctx, 1), 0)
            if ctx.rank == 2:
                here(ctx).synchronize()
                dist.send(torch.ones(1), 1)
        here(ctx).synchronize()
        dist.recv(torch.ones(1), (ctx.rank + 1) % 3)  # until the group fails
    except ERRORS as error:
        return str(error)
    return ""


def test_a_receiver_that_names_no_rank(fresh_device_world, scripted):
    world = fresh_device_world(3, "nccl", init=False)
    for answer in world.run(from_any_through_host_memory):
        assert "MYCOLL_CUDA differs: it is host on rank 0 and auto on rank 1" in answer, answer


def shared_gpu(ctx: Ctx) -> None:
    """Ranks that share a GPU use host memory, unless the program has configured NCCL for that."""
    os.environ["STANDIN_BUS_ID"] = "0000:3b:00.0"
    os.environ["MYCOLL_CUDA"] = "auto"
    ctx.init()
    for variable, path in ((None, "host"), (None, "host"), ("NCCL_HOSTID", "nccl")):
        if variable:
            os.environ[variable] = f"rank{ctx.rank}"
        group = dist.new_group()
        x = full(ctx, ctx.rank)
        dist.all_reduce(x, group=group)
        is_all(ctx, x, sum(range(ctx.size)))
        ctx.equal(group._get_backend(ctx.device).device_transport(), path)


def test_ranks_that_share_a_gpu(fresh_device_world, scripted):
    world = fresh_device_world(2, "nccl", init=False)
    world.run(shared_gpu)
    warned = [member.log_tail().count("through host memory") for member in world.members]
    assert warned == [1, 0], "one warning"


def options_for_nccl(ctx: Ctx) -> None:
    """The options are passed to NCCL, which refuses these."""
    import mycoll

    options = mycoll.Options()
    options.nccl.min_ctas, options.nccl.max_ctas = 8, 4
    group = dist.new_group(pg_options=options)
    with ctx.raises(ERRORS, "ncclCommInitRankConfig"):
        dist.all_reduce(full(ctx, 1), group=group)


def test_options_for_nccl(fresh_device_world):
    fresh_device_world(2, "nccl").run(options_for_nccl)


def old_gpu(ctx: Ctx) -> None:
    """NCCL reduces float8 only on newer GPUs. The call is refused on all ranks; the group works."""
    os.environ["STANDIN_CAPABILITY"] = "89" if ctx.rank == 1 else "90"
    ctx.init()
    x = full(ctx, 1)
    with ctx.raises(ERRORS, "takes GPUs from sm_90 on, and a rank has one of sm_89"):
        dist.all_reduce(x.to(torch.float8_e4m3fn))
    dist.broadcast(x.to(torch.float8_e4m3fn), 0)
    dist.all_reduce(x)
    is_all(ctx, x, ctx.size)


def test_an_old_gpu(fresh_device_world, scripted):
    fresh_device_world(2, "nccl", init=False).run(old_gpu)


def old_library(ctx: Ctx) -> None:
    """With an older NCCL, only calls without a replacement are refused."""
    import mycoll

    os.environ["MYCOLL_NCCL_LIBRARY"] = str(device.standins() / "required" / "libnccl.so.2")
    ctx.init(device_id=ctx.device)
    with ctx.raises(ERRORS, "has no ncclMemAlloc"):
        mycoll.nccl_mem_pool()
    child = dist.split_group(split_ranks=[[0, 1]])
    x = full(ctx, ctx.rank)
    dist.all_reduce(x, group=child)
    is_all(ctx, x, sum(range(ctx.size)))


def test_an_old_library(fresh_device_world, standin, scripted):
    fresh_device_world(2, "nccl", init=False).run(old_library)


def another_library(ctx: Ctx) -> None:
    """_use_nccl() selects the library, as tests with a CUDA build of torch need."""
    from mycoll import _C

    _C._use_nccl(str(device.standins() / "libnccl.so.2"))
    _C._require_nccl_memory()
    ctx.init()
    x = full(ctx, ctx.rank)
    dist.all_reduce(x)
    is_all(ctx, x, sum(range(ctx.size)))


def test_another_library(fresh_device_world, standin):
    fresh_device_world(2, "nccl", init=False).run(another_library)
