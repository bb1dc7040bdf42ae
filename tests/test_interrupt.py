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
SOON = 5.0  # half a second is what is promised; this machine may be busy


def interrupted(ctx: Ctx, name: str) -> float:
    x = torch.ones(10)
    dist.all_reduce(x)
    wait = {
        "all_reduce": lambda: dist.all_reduce(x),
        "wait": lambda: dist.all_reduce(x, async_op=True).wait(),
        "future": lambda: dist.all_reduce(x, async_op=True).get_future().wait(),
        "barrier": dist.barrier,
        "recv": lambda: dist.recv(x, 1),
        "recv from anyone": lambda: dist.recv(x),
        "large all_reduce": lambda: dist.all_reduce(torch.ones(3_000_000)),
    }[name]
    store = ctx.store("interrupted")
    if ctx.rank:
        store.wait(["done"], timedelta(seconds=60))
        return 0.0
    started = time.monotonic()
    threading.Timer(BEFORE, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        wait()
        ctx.fail("it came back as if nothing had happened")
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
        # Whoever waits is in the same loop, over every transport.
        *((name, "shm") for name in ("wait", "barrier", "recv from anyone", "large all_reduce")),
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
