"""Calls on device tensors return before their result exists. If the operation fails later, the
program gets one error before it can use a wrong result, and no other thread is interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from worlds import device
from worlds.device_tensors import captured_all_reduce, full, is_all, slow
from worlds.pool import World
from worlds.worker import Ctx

INVALID = "Results computed on the device since then are invalid"


def read_after_a_death(ctx: Ctx, how: str) -> str:
    """Reads the result of an operation that fails after its call has returned. Returns the error
    that this rank gets instead."""
    x = full(ctx, 1)
    dist.all_reduce(x)
    torch.accelerator.synchronize()
    if how == "replay":
        graph = device.graph_on(ctx.device)
        with graph.capture():
            dist.all_reduce(x)
        graph.replay()
        torch.accelerator.synchronize()
        time.sleep(1)  # the device is idle for some time
    dist.barrier()
    if ctx.rank == 1:
        time.sleep(1)  # the other rank starts its call meanwhile
        os.kill(os.getpid(), signal.SIGKILL)
    loss = full(ctx, 100)
    try:
        if how == "sync":
            dist.all_reduce(loss)
        elif how == "wait":
            dist.all_reduce(loss, async_op=True).wait()
        elif how == "future":
            dist.all_reduce(loss, async_op=True).get_future().wait()
        else:
            graph.replay()
        number = loss[0].item()
        ctx.fail(f"the program read the loss {number}")
    except dist.DistBackendError as error:
        text = str(error)
    # The error is raised once, so that the program can clean up.
    ended = time.monotonic() + 0.5
    while time.monotonic() < ended:
        torch.accelerator.synchronize()
    with ctx.raises(dist.DistBackendError, INVALID):
        dist.all_reduce(x)
    return text


def assert_error_before_the_number(world: World, how: str) -> str:
    world.start(read_after_a_death, how)
    text = world.finish(allow_gone=True)[0]
    assert "rank 1" in text, text
    assert INVALID in text, text
    return text


def test_the_error_names_the_line_that_called(fresh_device_world):
    env = (("MYCOLL_CALL_SITES", "always"),)
    text = assert_error_before_the_number(fresh_device_world(2, "nccl", env=env), "wait")
    assert "On this rank (0): all_reduce (test_device_late_failures.py:" in text, text
    assert " in read_after_a_death) was under way" in text, text


@pytest.mark.parametrize("how", ["sync", "wait", "future"])
def test_a_missing_result_is_an_error(fresh_device_world, how):
    assert_error_before_the_number(fresh_device_world(2, "nccl"), how)


@pytest.mark.usefixtures("graphs")
def test_a_missing_result_of_a_replay_is_an_error(fresh_device_world):
    assert_error_before_the_number(fresh_device_world(2, "nccl"), "replay")


def fail_one_after_another(ctx: Ctx) -> list[tuple[str, str]]:
    """Several groups fail in quick succession, and the program catches each error. Returns the
    errors, and what the program was doing: a late rank gets the error in its call."""
    errors, few, many = [], 4, 20_000  # sizes for which NCCL's operation never ends
    for step in range(3):
        group = dist.new_group()
        for numel in (few, many):  # makes the connections
            dist.all_reduce(full(ctx, 1, numel), group=group)
        torch.accelerator.synchronize()
        if step == 0:  # on the CPU
            with ctx.raises(dist.DistBackendError, "MISMATCH"):
                dist.all_reduce(torch.ones(2 + ctx.rank), group=group)
        else:
            loss = full(ctx, 1, many if ctx.rank else few)
            doing = "calls"
            try:
                dist.all_reduce(loss, group=group)
                doing = "computes"
                ctx.fail(f"the program read the loss {loss[0].item()}")
            except dist.DistBackendError as error:
                errors.append((str(error), doing))
        dist.barrier()
        dist.destroy_process_group(group)
        dist.barrier()
    return errors


def test_a_failure_does_not_hide_the_next(fresh_device_world):
    for errors in fresh_device_world(2, "nccl").run(fail_one_after_another):
        assert len(errors) == 2
        for text, doing in errors:
            assert "MISMATCH" in text, text
            assert doing == "calls" or INVALID in text, text


def gets_through(ctx: Ctx, nap: float) -> tuple[str, str]:
    """A mismatch that the device does not detect, so that results are wrong. Returns the error, and
    what the program was doing: a late rank may get the error in its call."""
    group = dist.new_group()
    dist.all_reduce(full(ctx, 1), group=group)  # so that later calls are compared after they return
    dtype = torch.float32 if ctx.rank == 0 else torch.int32
    parts = torch.zeros(8, dtype=dtype, device=ctx.device)
    doing = "calls"
    try:
        dist.all_gather_into_tensor(parts, parts[:4].clone(), group=group)
        doing = "computes"
        parts[0].item()
        ended = time.monotonic() + nap
        while time.monotonic() < ended:
            time.sleep(0.01)
        doing = "ends"
        dist.destroy_process_group(group)
        ended = time.monotonic() + 3
        while time.monotonic() < ended:
            time.sleep(0.01)
    except dist.DistBackendError as error:
        return str(error), doing
    return "", doing


@pytest.mark.parametrize("nap", [0.0, 30.0])
def test_wrong_numbers_are_reported(fresh_device_world, nap):
    """At least one of the ranks gets the error if the program ends immediately. Otherwise both get
    it promptly, because the program may use the numbers for long without another call."""
    found = [each for each in fresh_device_world(2, "nccl").run(gets_through, nap) if each[0]]
    assert len(found) >= (2 if nap else 1)
    for text, doing in found:
        assert "MISMATCH" in text, text
        assert doing == "calls" or INVALID in text, text
        assert doing != "ends" or not nap, text


def ends_cleanly(ctx: Ctx) -> None:
    """Destroying a group that a graph has used, or one that was aborted, interrupts no thread."""
    x = full(ctx, 1)
    for how in ("destroy", "abort"):
        group = dist.new_group()
        dist.all_reduce(x, group=group)
        torch.accelerator.synchronize()
        graph = device.graph_on(ctx.device)
        with graph.capture():
            dist.all_reduce(x, group=group)
        graph.replay()
        torch.accelerator.synchronize()
        graph.reset()
        dist.barrier()
        if how == "abort":
            group._get_backend(ctx.device).abort()
        dist.destroy_process_group(group)
        ended = time.monotonic() + 0.3
        while time.monotonic() < ended:
            torch.accelerator.synchronize()


@pytest.mark.usefixtures("graphs")
def test_a_clean_end_interrupts_no_thread(fresh_device_world):
    fresh_device_world(2, "nccl").run(ends_cleanly)


def dies_while_another_leaves(ctx: Ctx) -> str:
    """A group is destroyed while a graph is replayed that needs a rank that dies."""
    _, graph = captured_all_reduce(ctx)
    dist.barrier()
    if ctx.rank == 1:
        time.sleep(1)  # the other rank leaves meanwhile
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        graph.replay()
        dist.destroy_process_group()
    except dist.DistBackendError as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("graphs")
def test_a_death_is_detected_while_nccl_ends(fresh_device_world):
    world = fresh_device_world(2, "nccl")
    world.start(dies_while_another_leaves)
    text = world.finish(allow_gone=True)[0]
    assert "Connection closed by peer: rank 1" in text and INVALID in text, text


def leaves_first(ctx: Ctx) -> None:
    """The root of a broadcast finishes and leaves long before the other ranks' devices run it. One
    of them learns of the root's calls only from its notice that it leaves."""
    x = full(ctx, ctx.rank, 100)
    dist.broadcast(x, 1)
    torch.accelerator.synchronize()
    dist.barrier()
    if ctx.rank == 1:
        dist.broadcast(x.fill_(7), 1)
    else:
        for _ in range(50):
            slow(ctx)
        dist.broadcast(x, 1)
        torch.accelerator.synchronize()
        is_all(ctx, x, 7)
    dist.destroy_process_group()


def test_a_rank_that_leaves_first_is_not_missed(fresh_device_world):
    fresh_device_world(3, "nccl").run(leaves_first)


def another_thread_gets_it_first(ctx: Ctx) -> str:
    """Another thread gets the error first and ignores it."""
    x = full(ctx, 1)
    dist.all_reduce(x)
    other = dist.new_group()
    (dist.recv if ctx.rank == 0 else dist.send)(x.clone(), 1 - ctx.rank)
    if ctx.rank == 0:  # a timeout of wait() is no failure of the group
        work = dist.irecv(x.clone(), 1)
        # On another stream, because the barrier waits for the work on the current stream.
        with torch.Stream(device=ctx.device), ctx.raises(dist.DistBackendError, "timed out"):
            work.wait(timedelta(milliseconds=300))
    dist.barrier()
    if ctx.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    def background() -> None:
        with contextlib.suppress(dist.DistBackendError):
            dist.all_reduce(torch.ones(4), group=other)

    thread = threading.Thread(target=background)
    thread.start()
    try:
        dist.all_reduce(x)
        number = x[0].item()
        ctx.fail(f"the program read {number}")
    except dist.DistBackendError as error:
        return str(error)
    finally:
        thread.join()
    return ""


def test_each_thread_gets_the_error(fresh_device_world):
    world = fresh_device_world(2, "nccl")
    world.start(another_thread_gets_it_first)
    assert INVALID in world.finish(allow_gone=True)[0]
