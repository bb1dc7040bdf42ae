"""Hooks that raise, helper threads, and the engine's log."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mycoll._native import native
from worlds.worker import Ctx


def signals_blocked() -> list[tuple[str, int]]:
    """The name of each of mycoll's threads, and its mask of blocked signals."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            status = (task / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has just ended
        lines = dict(line.split(":", 1) for line in status.splitlines())
        if lines["Name"].strip().startswith("mycoll"):
            found.append((lines["Name"].strip(), int(lines["SigBlk"], 16)))
    return sorted(found)


def helper_threads(ctx: Ctx) -> None:
    """mycoll has one thread, two with device tensors, and another one while it runs callbacks. They
    block signals, so that Ctrl-C and a user's handlers run on the user's threads."""
    wanted = ["mycoll", *(["mycoll-watchdog"] if ctx.setup.device else [])]
    seen: list[tuple[str, int]] = []
    future = dist.all_reduce(torch.ones(3, device=ctx.device), async_op=True).get_future()
    future.then(lambda _: seen.extend(signals_blocked())).wait()
    names: list[str] = []
    deadline = time.monotonic() + 10
    while names != wanted and time.monotonic() < deadline:  # a thread sets its own name
        seen += signals_blocked()
        names = [name for name, _ in signals_blocked() if name != "mycoll-callback"]
    ctx.equal(names, wanted)
    for name, mask in seen:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
            ctx.equal((name, each.name, mask >> (each - 1) & 1), (name, each.name, 1))


@contextlib.contextmanager
def engines_log(level: int) -> Iterator[Callable[[], list[str]]]:
    """Collects the lines of the engine's log up to this level of MYCOLL_LOG (1: failure)."""
    with os.fdopen(os.memfd_create("log"), "r+b") as file:
        native()._log_to(f"/proc/self/fd/{file.fileno()}", level)

        def lines() -> list[str]:
            file.seek(0)
            return file.read().decode().splitlines()

        try:
            yield lines
        finally:
            native()._log_to("", 1)


def hooks_that_raise(ctx: Ctx, failures: tuple[type[BaseException], ...]) -> None:
    """The first exception of a hook is logged with its group and operation; all else continues."""
    for failure in failures:
        for level, lines_wanted in ((1, 1), (2, 3)):
            calls = []

            def hook(info: Any, calls: list[str] = calls, failure=failure) -> None:
                calls.append(info.op_type.name)
                raise failure("my hook is wrong")

            group = dist.new_group()
            group._register_on_completion_hook(hook)
            x = torch.ones(3, device=ctx.device)
            with engines_log(level) as lines:
                dist.all_reduce(x, group=group)
                group._wait_for_pending_works()
                dist.all_reduce(x, group=group, async_op=True).wait()
                dist.broadcast(x, 0, group=group)
                group._wait_for_pending_works()
                found = lines()
            ctx.equal(sorted(calls), ["ALLREDUCE", "ALLREDUCE", "BROADCAST"])
            ctx.equal(len(found), lines_wanted, "\n".join(found))
            name = dist.distributed_c10d._get_process_group_name(group)
            for words in (
                f"group '{name}': the completion hook has failed after ALLREDUCE, operation 0",
                failure.__name__,
                "my hook is wrong",
                "hooks.py",
            ):
                ctx.equal((words in found[0]) if found else None, True, f"{words} in {found}")
            dist.destroy_process_group(group)
