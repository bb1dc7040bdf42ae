"""Calls in a forked child, which mycoll must refuse."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from worlds.worker import Ctx, write_coverage

Calls = dict[str, Callable[[], object]]


def calls_of_work(name: str, work: dist.Work) -> Calls:
    methods = ("wait", "is_completed", "is_success", "exception", "result", "synchronize")
    methods += ("get_future", "get_future_result", "_source_rank", "_get_duration")
    return {f"{method} of {name}": getattr(work, method) for method in methods}


def refused_in_a_child(ctx: Ctx, calls: Calls, objects: dict[str, Any]) -> None:
    """Checks that a forked child gets an error from each call, and can destroy its objects."""
    wanted = {*calls, "end"}
    answers = _answers_of_a_child(calls, objects)
    ctx.equal(set(answers), wanted, "the child's answers")
    for name, text in answers.items():
        if "forked" not in text:
            ctx.fail(f"{name}: {text}")


def _answers_of_a_child(calls: Calls, objects: dict[str, Any]) -> dict[str, str]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for name in list(calls):
                text = "no error"
                try:
                    calls.pop(name)()
                except RuntimeError as error:
                    text = str(error)
                except BaseException as error:
                    text = repr(error)
                os.write(write, f"{name}\t{text.splitlines()[0]}\n".encode())
            objects.clear()
            gc.collect()
            os.write(write, b"end\tforked\n")
            write_coverage()
        finally:
            os._exit(0)
    os.close(write)
    os.set_blocking(read, False)
    end, text = time.monotonic() + 20, b""
    while time.monotonic() < end and os.waitpid(pid, os.WNOHANG) == (0, 0):
        time.sleep(0.01)
        with contextlib.suppress(BlockingIOError):
            text += os.read(read, 1 << 16)
    if time.monotonic() >= end:
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(BlockingIOError):
        text += os.read(read, 1 << 16)
    os.close(read)
    return dict(line.split("\t", 1) for line in text.decode().splitlines())
