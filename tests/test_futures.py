"""Callbacks of futures that begin operations of their own: all ranks make of it one order."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from worlds.training import close
from worlds.worker import Ctx


def futures_in_order(ctx: Ctx) -> None:
    """Callbacks that begin operations of their own, beside a program that begins others."""
    chance = ctx.random(ctx.rank)
    group = dist.new_group()
    for round_ in range(20):
        outcome = {}

        def doubled(future: torch.futures.Future, outcome=outcome) -> torch.Tensor:
            time.sleep(chance.choice((0, 0.002)))
            total = future.value()[0]
            again = dist.all_reduce(total.clone(), group=group, async_op=True)
            outcome["sum"] = again.get_future().wait()[0]
            return outcome["sum"]

        x = torch.full((5,), float(round_))
        future = dist.all_reduce(x, group=group, async_op=True).get_future()
        time.sleep(chance.choice((0, 0.001)))
        chained = future.then(doubled)
        mine = torch.full((7,), float(ctx.rank))  # of another size: an exchange would be noticed
        dist.all_reduce(mine, group=group)
        close(ctx, mine, torch.full((7,), float(sum(range(ctx.size)))), "the program's own")
        close(ctx, chained.wait(), torch.full((5,), float(round_ * ctx.size**2)), "the callback's")
    dist.destroy_process_group(group)


@pytest.mark.worlds(2, 3)
def test_operations_begun_in_callbacks(world):
    world.run(futures_in_order)


def unwaited(ctx: Ctx) -> None:
    """Callbacks that leave behind futures of their own, and do not wait for them."""
    chance = ctx.random(ctx.rank)
    group = dist.new_group()
    for _ in range(20):
        order: list[str] = []
        inner = []

        def begun(name: str, size: int, order=order, inner=inner):
            def callback(future: torch.futures.Future) -> None:
                time.sleep(chance.choice((0, 0.001)))
                order.append(name)
                if size < 12:
                    work = dist.all_reduce(torch.ones(size), group=group, async_op=True)
                    inner.append(work.get_future().then(begun(name + "'", size + 10)))

            return callback

        outer = []
        for name, size in (("a", 2), ("b", 3), ("c", 4)):
            future = dist.all_reduce(torch.ones(size), group=group, async_op=True).get_future()
            time.sleep(chance.choice((0, 0.001)))
            outer.append(future.then(begun(name, size + 5)))
        dist.all_reduce(torch.ones(9), group=group)
        ctx.equal(order, ["a", "a'", "b", "b'", "c", "c'"])
        for future in (*outer, *inner):
            future.wait()
    dist.destroy_process_group(group)


@pytest.mark.worlds(2, 3)
def test_callbacks_that_leave_futures_behind(world):
    if world.backend == "gloo":
        pytest.skip("gloo's callbacks run in no order")
    world.run(unwaited)


def endless(ctx: Ctx) -> None:
    """A callback that does not return: the next operation says so; the group lives on."""
    store = ctx.store("endless")
    if ctx.rank == 0:
        leave = threading.Event()
        future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
        chained = future.then(lambda _: leave.wait(30))
        store.set("hung", "")  # only now can it complete: not in this thread
        with ctx.raises(dist.DistBackendError, "callback", "has not returned"):
            dist.all_reduce(torch.ones(3))
        leave.set()
        chained.wait()
        store.set("left", "")
    else:
        store.wait(["hung"], timedelta(seconds=30))
        dist.all_reduce(torch.ones(3))
        store.wait(["left"], timedelta(seconds=30))
    x = torch.ones(3)
    dist.all_reduce(x)
    close(ctx, x, torch.full((3,), float(ctx.size)))


def test_a_callback_that_does_not_return(fresh, transport, backend):
    if backend == "gloo":
        pytest.skip("gloo's operations do not wait for callbacks")
    fresh(2, transport, timeout=2.0).run(endless)


def last_reference(ctx: Ctx) -> None:
    """The callback holds the last reference to its group, which then ends on that thread."""
    group = dist.new_group()
    may_end, ended = threading.Event(), threading.Event()

    def callback(_, group: list = [group]) -> None:  # noqa: B006
        may_end.wait(30)
        threading.Timer(0.2, ended.set).start()

    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    future = work.get_future()
    if future.done():
        may_end.set()  # it runs at once, in this thread
    chained = future.then(callback)
    del callback, work, future
    threading.Timer(0.1, may_end.set).start()
    dist.destroy_process_group(group)
    del group, chained
    ctx.equal(ended.wait(30), True)
    dist.barrier()


@pytest.mark.worlds(2)
def test_a_group_that_ends_in_a_callback(world):
    if world.backend == "gloo":
        pytest.skip("gloo ends the process")
    world.run(last_reference)


def failing(ctx: Ctx) -> None:
    """A callback that raises is the future's error, and nobody else's."""
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()

    def refuse(_: torch.futures.Future) -> None:
        raise ValueError("not today")

    chained = future.then(refuse)
    x = torch.ones(3)
    dist.all_reduce(x)
    close(ctx, x, torch.full((3,), float(ctx.size)))
    with ctx.raises((ValueError, RuntimeError), "not today"):
        chained.wait()


@pytest.mark.worlds(2)
def test_a_callback_that_raises(world):
    world.run(failing)
