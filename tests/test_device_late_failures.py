"""Calls on device tensors return before there is a result. When it will never come, the program
gets an error before it can use a wrong number, once; and nobody else is interrupted."""

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
    """Reads a result that never came, after calls that have returned. Returns the error that this
    rank gets instead of the number."""
    x = full(ctx, 1)
    dist.all_reduce(x)
    torch.accelerator.synchronize()
    if how == "replay":
        graph = device.graph_on(ctx.device)
        with graph.capture():
            dist.all_reduce(x)
        graph.replay()
        torch.accelerator.synchronize()
        time.sleep(1)  # nothing is under way for a while
    dist.barrier()
    if ctx.rank == 1:
        time.sleep(1)  # the other one is in its call by then
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
        ctx.fail(f"the loss is {number}, says the program")
    except dist.DistBackendError as error:
        text = str(error)
    # Once is enough: a program that cleans up is left alone.
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
def test_a_result_that_never_came_is_an_error(fresh_device_world, how):
    assert_error_before_the_number(fresh_device_world(2, "nccl"), how)


@pytest.mark.usefixtures("graphs")
def test_a_replayed_result_that_never_came_is_an_error(fresh_device_world):
    assert_error_before_the_number(fresh_device_world(2, "nccl"), "replay")


def fail_one_after_another(ctx: Ctx) -> list[tuple[str, str]]:
    """Failures of several groups, one soon after the other, each of them caught by the program.
    Returns the errors, and what the program did then: a rank that is late gets it in its call."""
    errors, few, many = [], 4, 20_000  # over which NCCL does not come to an end
    for step in range(3):
        group = dist.new_group()
        for numel in (few, many):  # connects
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
                ctx.fail(f"the loss is {loss[0].item()}, says the program")
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
    """Ranks that differ in what the device does not look at: numbers come, and are wrong. Returns
    the error, and what the program did then: a rank that is late may get the error in its call."""
    group = dist.new_group()
    dist.all_reduce(full(ctx, 1), group=group)  # so that what follows is compared a little later
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
    """To one of the two at least where nothing comes after them but the end. Otherwise to both, and
    soon: the program may do much with them before it calls anything."""
    found = [each for each in fresh_device_world(2, "nccl").run(gets_through, nap) if each[0]]
    assert len(found) >= (2 if nap else 1)
    for text, doing in found:
        assert "MISMATCH" in text, text
        assert doing == "calls" or INVALID in text, text
        assert doing != "ends" or not nap, text


def ends_in_good_order(ctx: Ctx) -> None:
    """A group that a graph has used is destroyed, and so is one whose failure is known. Nobody is
    interrupted: what goes on after that is the program's own affair."""
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
def test_nobody_is_interrupted_by_a_good_end(fresh_device_world):
    fresh_device_world(2, "nccl").run(ends_in_good_order)


def dies_while_another_leaves(ctx: Ctx) -> str:
    """Its group is destroyed while a graph is under replay that needs a rank which dies."""
    _, graph = captured_all_reduce(ctx)
    dist.barrier()
    if ctx.rank == 1:
        time.sleep(1)  # the other one leaves by then
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        graph.replay()
        dist.destroy_process_group()
    except dist.DistBackendError as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("graphs")
def test_a_death_is_heard_of_while_nccl_ends(fresh_device_world):
    world = fresh_device_world(2, "nccl")
    world.start(dies_while_another_leaves)
    text = world.finish(allow_gone=True)[0]
    assert "Connection closed by peer: rank 1" in text and INVALID in text, text


def leaves_first(ctx: Ctx) -> None:
    """The root of a broadcast is done with it, and leaves, long before the others' devices come to
    it; of whom one does not hear of the root's calls but by its goodbye."""
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


def another_thread_hears_first(ctx: Ctx) -> str:
    """Another thread hears of the death first, and keeps it to itself."""
    x = full(ctx, 1)
    dist.all_reduce(x)
    other = dist.new_group()
    (dist.recv if ctx.rank == 0 else dist.send)(x.clone(), 1 - ctx.rank)
    if ctx.rank == 0:  # no failure, and no excuse for what comes later
        work = dist.irecv(x.clone(), 1)
        # On another stream: the barrier waits for what stands behind it on this one.
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
        ctx.fail(f"{number}, says the program")
    except dist.DistBackendError as error:
        return str(error)
    finally:
        thread.join()
    return ""


def test_each_thread_gets_the_error(fresh_device_world):
    world = fresh_device_world(2, "nccl")
    world.start(another_thread_hears_first)
    assert INVALID in world.finish(allow_gone=True)[0]
