"""Failures of operations on device tensors raise promptly on every rank, with an error that names
the rank and the call; and a group can always be destroyed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from faults.harness import kill_one
from jobs import mismatches
from worlds import device
from worlds.device_tensors import NUMEL, full, is_all, wait_for_all
from worlds.pool import World
from worlds.worker import Ctx

PATHS = ("nccl", "host")
SOON = 20.0  # seconds


def text_of_failure(ctx: Ctx, seconds: float = SOON) -> tuple[str, float]:
    """The error that this rank gets from one of a series of calls, and the time until then."""
    started = time.monotonic()
    try:
        while time.monotonic() - started < seconds:
            dist.all_reduce(full(ctx, 1))
            torch.accelerator.synchronize()
            time.sleep(0.01)
    except (dist.DistBackendError, RuntimeError) as error:
        return str(error), time.monotonic() - started
    return "", seconds


# --- ranks that disagree


def disagree(ctx: Ctx, name: str) -> tuple[str, float]:
    with ctx.device:
        text, took = mismatches.disagree(ctx, name)
    # If NCCL does not detect the mismatch, mycoll compares the calls separately, and a later call
    # raises the error.
    if not text:
        text, took = text_of_failure(ctx)
    wait_for_all(ctx)
    return text, took


# On the host path the engine compares the calls: test_mismatch has all cases.
@pytest.mark.parametrize(
    ("path", "name"),
    [("nccl", name) for name in ("operation", "dtype", "size", "size, large", "reduce op", "root")]
    + [("nccl", "async"), ("host", "operation"), ("host", "async")],
)
def test_mismatch_on_device(reused_device_world, path, name):
    for text, took in reused_device_world(2, path).run_in_group(disagree, name):
        for part in mismatches.MISMATCHES[name].texts:
            assert part.lower() in text.lower(), text
        assert took < SOON, f"{took:.1f} s until: {text}"


# --- a rank that dies, and one that makes no call


def outlive(ctx: Ctx) -> tuple[str, float]:
    x = full(ctx, 1)
    dist.all_reduce(x)
    torch.accelerator.synchronize()
    kill_one(ctx, 1)
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(x, async_op=True)
    return text_of_failure(ctx)


def assert_others_name_rank_1(world: World) -> None:
    answers = world.finish(allow_gone=True)
    for rank in (0, 2):
        text, took = answers[rank]
        assert "rank 1" in text, text
        assert took < SOON, f"{took:.1f} s until: {text}"


@pytest.mark.parametrize("path", PATHS)
def test_a_dead_rank_is_named(fresh_device_world, path):
    world = fresh_device_world(3, path)
    world.start(outlive)
    assert_others_name_rank_1(world)


def no_id(ctx: Ctx) -> tuple[str, float]:
    """ncclGetUniqueId fails on the rank that makes the id of a pair."""
    x = full(ctx, 1)
    dist.all_reduce(x)
    torch.accelerator.synchronize()
    if ctx.rank == 0:
        device.script_nccl("fail=id")
    dist.barrier()
    started, text = time.monotonic(), ""
    try:
        (dist.send if ctx.rank == 0 else dist.recv)(x, 1 - ctx.rank)
    except dist.DistBackendError as error:
        text = str(error)
    took = time.monotonic() - started
    wait_for_all(ctx)
    return text, took


def test_both_ranks_get_the_error_of_ncclGetUniqueId(fresh_device_world, scripted):
    for text, took in fresh_device_world(2, "nccl").run(no_id):
        assert "ncclGetUniqueId failed" in text, text
        assert took < SOON, f"{took:.1f} s until: {text}"


def hang_in_nccl(ctx: Ctx, how: str) -> str:
    """A call of NCCL waits for the other rank, which dies."""
    x = full(ctx, 1)
    dist.all_reduce(x)
    if how == "known pair":
        (dist.send if ctx.rank == 0 else dist.recv)(x, 1 - ctx.rank)
    torch.accelerator.synchronize()
    if ctx.rank == 0:
        device.script_nccl("hang=enqueue")
    dist.barrier()
    if ctx.rank == 1:
        if how == "new pair":
            threading.Thread(target=dist.isend, args=(x, 0), daemon=True).start()
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if how == "collective":
            dist.all_reduce(x)
        elif "pair" in how:
            dist.recv(x, 1)
        else:
            dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1)])[0].wait()
        torch.accelerator.synchronize()
        time.sleep(SOON)
    except dist.DistBackendError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["collective", "new pair", "known pair", "batch"])
def test_a_hang_in_nccl_ends_with_the_rank_it_waits_for(fresh_device_world, scripted, how):
    world = fresh_device_world(2, "nccl")
    world.start(hang_in_nccl, how)
    assert "rank 1" in world.finish(allow_gone=True)[0]


def dies_in_a_split(ctx: Ctx) -> tuple[str, float]:
    ctx.init(device_id=ctx.device)
    if ctx.rank == 1:
        device.script_nccl("hang=init")  # the other ranks wait for it in NCCL
        threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    started = time.monotonic()
    try:
        dist.split_group(split_ranks=[[0, 1, 2]])
    except RuntimeError as error:
        return str(error), time.monotonic() - started
    return "", 0.0


def test_a_split_ends_with_a_rank_that_dies(fresh_device_world, scripted):
    env = (("STANDIN_NCCL", "peer_death=hang"),)
    world = fresh_device_world(3, "nccl", init=False, env=env)
    world.start(dies_in_a_split)
    assert_others_name_rank_1(world)


def without_rank_1(ctx: Ctx, name: str, call: Callable[[], object]) -> tuple[str, float]:
    """The error of the other ranks' call while rank 1 makes none, and the time until then."""
    store = ctx.store(name)
    if ctx.rank == 1:
        store.wait(["done"], timedelta(seconds=40))
        return "", 0.0
    started = time.monotonic()
    try:
        call()
        text, _ = text_of_failure(ctx)
    except RuntimeError as error:
        text = str(error)
    took = time.monotonic() - started
    store.set("done", "")
    return text, took


def interrupted_at_first(ctx: Ctx) -> tuple[str, float]:
    """Ctrl-C while rank 0 waits for the first collective. Later collectives of the group must not
    be matched with it."""
    store = ctx.store("interrupted")
    if ctx.rank == 1:
        store.wait(["done"], timedelta(seconds=40))
        return text_of_failure(ctx)
    started = time.monotonic()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        dist.all_reduce(full(ctx, 1))
        ctx.fail("all_reduce returned without an error")
    except KeyboardInterrupt:
        pass
    took = time.monotonic() - started
    store.set("done", "")
    return text_of_failure(ctx)[0], took


def test_an_interrupt_of_the_first_collective(fresh_device_world):
    for text, took in fresh_device_world(2, "nccl").run(interrupted_at_first):
        assert "rank 0 was interrupted" in text, text
        assert took < SOON


def set_timeout(seconds: float) -> None:
    """Called when the group is connected, which may take longer than this timeout on a GPU."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)


def miss(ctx: Ctx, kind: str, timeout: float) -> tuple[str, float]:
    """Rank 1 makes no call; the error of the others names the rank and the call."""
    x = full(ctx, 1)
    if kind != "first":
        dist.all_reduce(x)
        torch.accelerator.synchronize()
    set_timeout(timeout)

    def call() -> None:
        work = dist.all_reduce(x, async_op=kind == "async")
        if kind == "wait":
            dist.all_reduce(x, async_op=True).wait(timedelta(seconds=2))
        elif work is not None:
            work.wait()

    return without_rank_1(ctx, "miss", call)


@pytest.mark.parametrize(
    ("path", "kind", "timeout"),
    [("nccl", "first", 3.0), ("nccl", "sync", 1.5), ("nccl", "async", 1.5), ("host", "async", 1.5)],
)
def test_a_timeout_names_the_missing_rank(reused_device_world, path, kind, timeout):
    text, took = reused_device_world(2, path).run_in_group(miss, kind, timeout)[0]
    assert "rank 1" in text, text
    assert "all_reduce" in text, text
    assert timeout - 1.0 < took < SOON, f"{took:.1f} s until: {text}"


def unanswered(ctx: Ctx, kind: str) -> tuple[str, float]:
    """Rank 1 does not call its side of the first message."""
    if kind == "batch":
        dist.all_reduce(full(ctx, 1))
        torch.accelerator.synchronize()
    set_timeout(3)

    def call() -> None:
        x, y = full(ctx, 1), full(ctx, 1)
        if kind == "batch":
            ops = [dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, y, 1)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        else:
            getattr(dist, kind)(x, 1).wait()

    return without_rank_1(ctx, "unanswered", call)


@pytest.mark.parametrize(
    ("path", "kind"), [("nccl", "isend"), ("nccl", "irecv"), ("nccl", "batch"), ("host", "irecv")]
)
def test_a_message_without_a_counterpart(reused_device_world, path, kind):
    text, took = reused_device_world(2, path).run_in_group(unanswered, kind)[0]
    assert "rank 1" in text, text
    assert "recv from" in text if kind in ("irecv", "batch") else "send to" in text, text
    assert path == "host" or str(4 * NUMEL) in text, text
    assert 2.0 < took < SOON, f"{took:.1f} s until: {text}"


# --- a device that fails


def on_a_broken_device(ctx: Ctx, kind: str) -> str:
    """From some point on, rank 1's device returns an error, as after a kernel that failed."""
    x = full(ctx, 1)

    def call() -> dist.Work:
        if kind == "collective":
            return dist.all_reduce(x, async_op=True)
        return dist.isend(x, 0) if ctx.rank == 1 else dist.irecv(x, 1)

    first = call()
    first.wait()
    torch.accelerator.synchronize()
    ctx.equal(first.is_completed(), True)  # so the device is not queried about it later
    dist.barrier()
    if ctx.rank == 1:
        device.break_device("an illegal memory access was encountered")
    try:
        work = call()
    except dist.DistBackendError as error:
        assert ctx.rank == 0  # rank 1 has failed already
        wait_for_all(ctx)
        return str(error)
    if ctx.rank == 1:
        with ctx.raises(dist.DistBackendError, "illegal memory access"):
            work.wait(timedelta(seconds=SOON))
        ctx.equal(work.is_success(), False)
    text, _ = text_of_failure(ctx)
    if ctx.rank == 1:
        device.break_device("")
    wait_for_all(ctx)
    return text


@pytest.mark.parametrize("kind", ["collective", "message"])
@pytest.mark.parametrize("path", PATHS)
def test_an_error_of_a_device_is_raised_on_all_ranks(fresh_device_world, scripted, path, kind):
    for text in fresh_device_world(2, path).run(on_a_broken_device, kind):
        assert "rank 1" in text, text
        assert "the device reports an error" in text, text
        assert "frame #" not in text, text
        assert "illegal memory access" in text, text


# --- leaving


def leave(ctx: Ctx, how: str) -> float:
    """A group with an operation that will never end."""
    x = full(ctx, 1)
    dist.all_reduce(x)
    torch.accelerator.synchronize()
    wait_for_all(ctx)
    set_timeout(2)
    work = None
    if ctx.rank == 0:
        with contextlib.suppress(RuntimeError):  # the other rank may have aborted
            work = dist.all_reduce(x, async_op=True)
    started = time.monotonic()
    with contextlib.suppress(RuntimeError):
        if how == "abort":
            dist.distributed_c10d._get_default_group().abort()
        dist.destroy_process_group()
    took = time.monotonic() - started
    del work
    # The same ranks can make a new group.
    ctx.init("again")
    y = full(ctx, ctx.rank)
    dist.all_reduce(y)
    ctx.equal(y.cpu()[0].item(), float(sum(range(ctx.size))), "in a new group")
    return took


def ends_late(ctx: Ctx) -> int:
    """ncclCommFinalize of the first of two communicators does not return."""
    x = full(ctx, 1)
    dist.all_reduce(x)
    (dist.send if ctx.rank == 0 else dist.recv)(x, 1 - ctx.rank)
    torch.accelerator.synchronize()
    dist.barrier()
    device.script_nccl("hang=finalize")
    dist.destroy_process_group()
    return device.count_nccl("ncclCommFinalize")


def test_one_communicator_ends_at_a_time(fresh_device_world, scripted):
    assert fresh_device_world(2, "nccl").run(ends_late) == [1, 1]


@pytest.mark.parametrize("how", ["abort", "destroy"])
@pytest.mark.parametrize("path", PATHS)
def test_a_stuck_group_can_be_left(reused_device_world, path, how):
    for took in reused_device_world(2, path).run_in_group(leave, how):
        assert took < SOON, f"{took:.1f} s"


def shrinks(ctx: Ctx, victim: int) -> tuple[str, float]:
    x = full(ctx, 1)
    dist.all_reduce(x)
    ctx.equal(float(x[0]), float(ctx.size))
    kill_one(ctx, victim)
    seen = text_of_failure(ctx)
    left = [r for r in range(ctx.size) if r != victim]
    dist.shrink_group([victim], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    for where in (ctx.device, torch.device("cpu")):
        y = torch.full((1000,), float(ctx.rank), device=where)
        dist.all_reduce(y)
        ctx.equal(float(y[7]), float(sum(left)), f"on {where}")
    return seen


@pytest.mark.parametrize("path", PATHS)
def test_survivors_shrink_and_continue(fresh_device_world, path):
    world = fresh_device_world(3, path)
    world.start(shrinks, 1)
    for rank, seen in enumerate(world.finish(allow_gone=True)):
        assert rank == 1 or "rank 1 (" in seen[0], seen


def late_beside_destroy(ctx: Ctx) -> None:
    import mycoll

    options = mycoll.Options(shutdown_timeout=timedelta(seconds=0.2))
    group = dist.new_group(pg_options=options)
    x = full(ctx, ctx.rank + 1)
    dist.all_reduce(full(ctx, 1), group=group)
    torch.accelerator.synchronize()
    if ctx.rank == 1:
        time.sleep(1)  # longer than the shutdown timeout
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    is_all(ctx, x, 3)


def test_destroy_waits_for_enqueued_operations(fresh_device_world):
    fresh_device_world(2, "nccl").run(late_beside_destroy)
