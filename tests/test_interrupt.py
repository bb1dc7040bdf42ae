"""Ctrl-C while a rank waits."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from worlds.worker import Ctx

BEFORE = 0.5  # seconds until the signal
SOON = 5.0  # the promise is half a second, but this machine may be busy


def interrupted(ctx: Ctx, name: str) -> float:
    x = torch.ones(10)
    dist.all_reduce(x)
    group = dist.new_group()

    def leave() -> None:
        dist.all_reduce(x, group=group, async_op=True)
        dist.destroy_process_group(group)

    wait = {
        "all_reduce": lambda: dist.all_reduce(x),
        "wait": lambda: dist.all_reduce(x, async_op=True).wait(),
        "future": lambda: dist.all_reduce(x, async_op=True).get_future().wait(),
        "barrier": dist.barrier,
        "recv": lambda: dist.recv(x, 1),
        "recv from anyone": lambda: dist.recv(x),
        "large all_reduce": lambda: dist.all_reduce(torch.ones(3_000_000)),
        "destroy": leave,
    }[name]
    store = ctx.store("interrupted")
    if ctx.rank:
        store.wait(["done"], timedelta(seconds=60))
        return 0.0
    started = time.monotonic()
    threading.Timer(BEFORE, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        wait()
        ctx.fail("the call returned without an error")
    except KeyboardInterrupt:
        pass
    except Exception as error:
        ctx.fail(f"{type(error).__name__} instead of KeyboardInterrupt: {error}")
    seconds = time.monotonic() - started
    store.set("done", "")
    return seconds


@pytest.mark.parametrize(
    ("name", "over"),
    [
        *(("all_reduce", over) for over in ("shm", "tcp")),
        # All calls wait in the same loop, for any transport.
        *((name, "shm") for name in ("wait", "barrier", "recv from anyone", "large all_reduce")),
        ("destroy", "shm"),
        ("recv", "tcp"),
    ],
)
def test_interrupt(reused, name, over):
    seconds = reused(2, over).run_in_group(interrupted, name)[0]
    assert BEFORE - 0.1 < seconds < BEFORE + SOON


def exit_after_interrupt(ctx: Ctx) -> None:
    interrupted(ctx, "all_reduce")


def test_processes_end_after_an_interrupt(fresh, transport):
    world = fresh(2, transport)
    world.run(exit_after_interrupt)
    assert None not in world.close(), "a process did not end"


def ends_meanwhile(ctx: Ctx) -> None:
    """The operation ends while the handler of a signal runs."""
    store = ctx.store("ends meanwhile")
    if ctx.rank:
        store.wait(["signalled"], timedelta(seconds=60))
        for _ in range(2):
            dist.all_reduce(torch.ones(10))
        return

    def slow(*_: object) -> None:
        store.set("signalled", "")
        time.sleep(0.5)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, slow)
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(2)]
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        works[0].wait()
        time.sleep(0)
        ctx.fail("the signal was lost")
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)
    for work in works:
        work.wait()


def test_an_operation_that_ends_while_a_signal_is_handled(reused, transport):
    reused(2, transport).run_in_group(ends_meanwhile)


def hook_takes_long(ctx: Ctx) -> None:
    group = dist.new_group()
    may_end = threading.Event()
    group._register_on_completion_hook(lambda _: may_end.wait(30))
    dist.all_reduce(torch.ones(10), group=group)
    started = time.monotonic()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        group._wait_for_pending_works()
        ctx.fail("the signal was lost")
    except KeyboardInterrupt:
        pass
    finally:
        may_end.set()
    if time.monotonic() - started > 15:
        ctx.fail("it waited for the hook")


def test_a_wait_for_completion_hooks(reused, mycoll_only):
    reused(2, "shm").run_in_group(hook_takes_long)
