"""Ranks that wait for each other get an error in seconds, long before the group's timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from faults.harness import Seen, attempt_and_leave
from worlds.worker import Ctx

SECONDS = 20.0  # on a busy machine
WARN_AFTER = timedelta(seconds=0.2)
LARGE = 1_000_000  # elements: not buffered by the receiver


def new_group(ctx: Ctx) -> dist.ProcessGroup:
    import mycoll

    return dist.new_group(timeout=ctx.timeout, pg_options=mycoll.Options(warn_after=WARN_AFTER))


def groups_in_crossed_order(ctx: Ctx) -> None:
    groups = [new_group(ctx) for _ in range(2)]
    x = torch.ones(10)
    for group in groups:
        dist.all_reduce(x, group=group)
    for group in groups if ctx.rank == 0 else groups[::-1]:
        dist.all_reduce(x, group=group)


def groups_never_used_in_crossed_order(ctx: Ctx) -> None:
    groups = [new_group(ctx) for _ in range(2)]
    for group in groups if ctx.rank == 0 else groups[::-1]:
        dist.barrier(group=group)


def async_then_waits_in_crossed_order(ctx: Ctx) -> None:
    """Each rank waits for one operation before it starts the other."""
    groups = [new_group(ctx) for _ in range(2)]
    for group in groups if ctx.rank == 0 else groups[::-1]:
        dist.all_reduce(torch.ones(10), group=group, async_op=True).wait()


def receives_from_each_other(ctx: Ctx) -> None:
    dist.recv(torch.ones(10), (ctx.rank + 1) % ctx.size)


def receives_from_itself(ctx: Ctx) -> None:
    dist.irecv(torch.ones(10), ctx.rank).wait()


def large_send_to_itself(ctx: Ctx) -> None:
    dist.isend(torch.ones(LARGE), ctx.rank).wait()


def large_sends_to_each_other(ctx: Ctx) -> None:
    dist.send(torch.ones(LARGE), (ctx.rank + 1) % ctx.size)


def message_against_collective(ctx: Ctx) -> None:
    if ctx.rank == 0:
        dist.recv(torch.ones(10), 1)
    else:
        dist.all_reduce(torch.ones(10))


# The number of ranks, and the words that each rank's error contains.
CASES: dict[Callable[[Ctx], None], tuple[int, tuple[str, ...]]] = {
    groups_in_crossed_order: (2, ("all_reduce", "group '1'", "group '2'")),
    groups_never_used_in_crossed_order: (2, ("barrier", "group '1'", "group '2'")),
    async_then_waits_in_crossed_order: (2, ("all_reduce", "group '1'", "group '2'")),
    receives_from_each_other: (3, ("recv",)),
    large_sends_to_each_other: (2, ("send",)),
    receives_from_itself: (1, ("recv", "a message of its own")),
    large_send_to_itself: (1, ("send", "a message of its own")),
    message_against_collective: (2, ("recv", "all_reduce")),
}


def runs_case(ctx: Ctx, case: Callable[[Ctx], None]) -> Seen:
    import mycoll

    ctx.init(pg_options=mycoll.Options(warn_after=WARN_AFTER))
    dist.barrier()
    return attempt_and_leave(lambda: case(ctx))


OVER_TCP_TOO = (groups_in_crossed_order, receives_from_each_other, large_sends_to_each_other)


@pytest.mark.parametrize(
    ("case", "over"),
    [*((case, "shm") for case in CASES), *((case, "tcp") for case in OVER_TCP_TOO)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_error_names_a_deadlock(reused, backend, case, over):
    if backend != "mycoll":
        pytest.skip("gloo does not detect deadlocks")
    size, words = CASES[case]
    world = reused(size, over)
    for rank, seen in enumerate(world.run(runs_case, case)):
        assert seen.kind == "DistBackendError", (rank, seen)
        assert "DEADLOCK" in seen.text, seen.text
        for word in (*words, *(f"rank {r} (" for r in range(size))):
            assert word in seen.text, (word, seen.text)
        assert seen.seconds < SECONDS, f"rank {rank}: {seen.seconds:.1f} s"


def a_thread_calls_later(ctx: Ctx) -> None:
    """The thread that sends has made no call yet."""
    answer = threading.Timer(1.0, lambda: dist.send(torch.ones(3), (ctx.rank + 1) % ctx.size))
    answer.start()
    dist.recv(torch.zeros(3), (ctx.rank + 1) % ctx.size)
    answer.join()


def a_callback_calls_later(ctx: Ctx) -> None:
    """Rank 0's second call waits until the callback of the first has run."""
    groups = [new_group(ctx) for _ in range(2)]
    first = dist.all_reduce(torch.ones(3), group=groups[0], async_op=True)
    if ctx.rank == 0:
        first.get_future().then(lambda _: time.sleep(1.0))
        held = dist.all_reduce(torch.ones(3), group=groups[0], async_op=True)
        dist.all_reduce(torch.ones(3), group=groups[1])
        held.wait()
    else:
        first.wait()
        for group in groups:
            dist.all_reduce(torch.ones(3), group=group)


@pytest.mark.parametrize(
    ("case", "over"), [(a_thread_calls_later, "shm"), (a_callback_calls_later, "tcp")]
)
def test_a_late_call_is_not_a_deadlock(reused, backend, case, over):
    if backend != "mycoll":
        pytest.skip("gloo has no futures of messages")
    world = reused(2, over)
    for rank, seen in enumerate(world.run(runs_case, case)):
        assert not seen.kind, (rank, seen)
