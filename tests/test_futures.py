"""Callbacks of futures that start operations: all ranks run all operations in one order."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from worlds.training import close
from worlds.worker import Ctx

pytestmark = pytest.mark.transports("shm")


def futures_in_order(ctx: Ctx) -> None:
    """Callbacks start operations while the program starts others."""
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
        mine = torch.full((7,), float(ctx.rank))  # another size, so that a mix-up is detected
        dist.all_reduce(mine, group=group)
        close(ctx, mine, torch.full((7,), float(sum(range(ctx.size)))), "the program's own")
        close(ctx, chained.wait(), torch.full((5,), float(round_ * ctx.size**2)), "the callback's")
    dist.destroy_process_group(group)


@pytest.mark.worlds(2, 3)
def test_operations_started_in_callbacks(world):
    world.run(futures_in_order)


def unwaited(ctx: Ctx) -> None:
    """Callbacks make further futures and do not wait for them."""
    chance = ctx.random(ctx.rank)
    group = dist.new_group()
    for _ in range(20):
        order: list[str] = []
        inner = []

        def starting(name: str, size: int, order=order, inner=inner):
            def callback(future: torch.futures.Future) -> None:
                time.sleep(chance.choice((0, 0.001)))
                order.append(name)
                if size < 12:
                    work = dist.all_reduce(torch.ones(size), group=group, async_op=True)
                    inner.append(work.get_future().then(starting(name + "'", size + 10)))

            return callback

        outer = []
        for name, size in (("a", 2), ("b", 3), ("c", 4)):
            future = dist.all_reduce(torch.ones(size), group=group, async_op=True).get_future()
            time.sleep(chance.choice((0, 0.001)))
            outer.append(future.then(starting(name, size + 5)))
        dist.all_reduce(torch.ones(9), group=group)
        ctx.equal(order, ["a", "a'", "b", "b'", "c", "c'"])
        for future in (*outer, *inner):
            future.wait()
    dist.destroy_process_group(group)


@pytest.mark.worlds(2, 3)
def test_callbacks_that_do_not_wait(world):
    if world.backend == "gloo":
        pytest.skip("gloo's callbacks run in no order")
    world.run(unwaited)


def calls_after_a_future(ctx: Ctx) -> None:
    """Asynchronous calls after a pending future return without waiting for other ranks."""
    a, b = torch.ones(3), torch.full((5,), 2.0)
    token = torch.zeros(1)
    if ctx.rank == 0:
        future = dist.all_reduce(a, async_op=True).get_future()
        work = dist.all_reduce(b, async_op=True)
        ctx.equal(work.is_completed(), False)
        dist.send(token, 1)  # rank 1 waits for it
        future.wait()
        work.wait()
    else:
        dist.recv(token, 0)
        dist.all_reduce(a)
        dist.all_reduce(b)
    close(ctx, a, torch.full((3,), 2.0))
    close(ctx, b, torch.full((5,), 4.0))


@pytest.mark.worlds(2)
def test_calls_after_a_pending_future(world):
    world.run(calls_after_a_future)


def nested_order(ctx: Ctx, query: str) -> None:
    """A callback queries the Work of a collective that it has called after adding another callback.
    On rank 0 all callbacks run in then(), on the other ranks on other threads."""
    group, started = dist.new_group(), dist.new_group()
    x, y = torch.ones(4), torch.full((4,), 100.0)
    waits: list[torch.futures.Future | dist.Work] = []

    def inner(_: torch.futures.Future) -> None:
        time.sleep(0.02)
        dist.all_reduce(x, group=group)

    def outer(_: torch.futures.Future) -> None:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        waits.append(work.get_future().then(inner))
        work = dist.all_reduce(y, group=group, async_op=True)
        if query == "poll":
            work.is_completed()
        elif query == "future":
            work.get_future()
        elif query == "wait":
            work.wait()
        waits.append(work)

    first = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    if ctx.rank == 0:
        first.wait()
    future = first.get_future().then(outer)
    dist.barrier(started)  # the callbacks of the other ranks run meanwhile
    future.wait()
    for each in waits:
        each.wait()
    close(ctx, x, torch.full((4,), float(ctx.size)), "called by the inner callback")
    close(ctx, y, torch.full((4,), 100.0 * ctx.size), "called by the outer one")
    dist.destroy_process_group(group)
    dist.destroy_process_group(started)


@pytest.mark.parametrize("query", ["poll", "future", "wait"])
@pytest.mark.worlds(3)
def test_a_callback_that_queries_its_own_call(world, query):
    world.run(nested_order, query)


def inputs_written_by_callbacks(ctx: Ctx, is_async: bool) -> None:
    """An operation reads its inputs after the preceding callbacks, also if it copies them."""
    multiply = dist._make_nccl_premul_sum(1.0)
    n = ctx.size
    reductions = {
        "contiguous": lambda x: dist.all_reduce(x, async_op=is_async),
        "transposed": lambda x: dist.all_reduce(x.t(), async_op=is_async),
        "coalesced": lambda x: dist.all_reduce_coalesced([x, torch.ones(1)], async_op=is_async),
        "multiplied": lambda x: dist.all_reduce(x, multiply, async_op=is_async),
        "gathered": lambda x: dist.all_gather_into_tensor(
            x.flatten()[:n], x.flatten()[1:2], async_op=is_async
        ),
    }
    for name, call in reductions.items():
        x = torch.ones(2, 3)
        first = dist.all_reduce(torch.ones(1), async_op=True)
        if ctx.rank == 0:
            first.wait()

        def multiplied(_: torch.futures.Future, x: torch.Tensor = x) -> None:
            time.sleep(0.02)
            x.mul_(10)

        future = first.get_future().then(multiplied)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work = call(x)
        if work:
            work.wait()
        future.wait()
        want = 10.0 if name == "gathered" else 10.0 * n
        ctx.equal(float(x[0, 0]), want, name)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.worlds(3)
def test_inputs_that_callbacks_write(world, is_async):
    world.run(inputs_written_by_callbacks, is_async)


def other_group_first(ctx: Ctx) -> None:
    """A call that waits in one group does not block calls of another group."""
    group = dist.new_group()
    a, b, c = torch.ones(3), torch.ones(5), torch.ones(7)
    if ctx.rank == 0:
        future = dist.all_reduce(a, async_op=True).get_future()
        work = dist.all_reduce(b, async_op=True)
        dist.all_reduce(c, group=group)
        work.wait()
        future.wait()
    else:
        dist.all_reduce(c, group=group)
        dist.all_reduce(a)
        dist.all_reduce(b)
    for x in (a, b, c):
        close(ctx, x, torch.full_like(x, 2.0))
    dist.destroy_process_group(group)


@pytest.mark.worlds(2)
def test_another_group_after_a_future(world):
    world.run(other_group_first)


def held(ctx: Ctx) -> None:
    """Held calls run after the callbacks before them and before later calls."""
    chance = ctx.random(ctx.rank)
    group = dist.new_group()
    for _ in range(20):
        order: list[str] = []

        def begin(future: torch.futures.Future, order=order) -> torch.Tensor:
            time.sleep(chance.choice((0, 0.002)))
            order.append("callback")
            total = future.value()[0].sum().reshape(1)
            dist.all_reduce(total, group=group)
            return total

        first = dist.all_reduce(torch.ones(2), group=group, async_op=True).get_future().then(begin)
        works = []
        for size in (3, 4, 5):
            x = torch.ones(size)
            works.append((dist.all_reduce(x, group=group, async_op=True), x))
        later = works[1][0].get_future().then(lambda _, order=order: order.append("later"))
        # The next, synchronous call also completes the last one.
        for work, _ in works[:-1]:
            work.wait()
        last = torch.ones(6)
        dist.all_reduce(last, group=group)
        ctx.equal(works[-1][0].is_completed(), True)
        for x in (*(x for _, x in works), last):
            close(ctx, x, torch.full_like(x, float(ctx.size)))
        close(ctx, first.wait(), torch.full((1,), 2.0 * ctx.size**2))
        later.wait()
        ctx.equal(order, ["callback", "later"])
    dist.destroy_process_group(group)


@pytest.mark.worlds(2, 3)
def test_held_calls_run_in_order(world):
    if world.backend == "gloo":
        pytest.skip("gloo's callbacks run in no order")
    world.run(held)


def endless(ctx: Ctx) -> None:
    """If a callback does not return, the next operation raises; the group remains usable."""
    store = ctx.store("endless")
    if ctx.rank == 0:
        leave = threading.Event()
        future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
        chained = future.then(lambda _: leave.wait(30))
        store.set("hung", "")  # the others wait for it, so the callback runs on another thread
        with ctx.raises(dist.DistBackendError, "callback", "has not returned"):
            dist.all_reduce(torch.ones(3))
        work = dist.all_reduce(torch.ones(3), async_op=True)
        with ctx.raises(
            dist.DistBackendError, "all_reduce has not started", "callback", "has not returned"
        ):
            work.wait()
        with ctx.raises(dist.DistBackendError, "has not started"):
            work.wait(timedelta(milliseconds=100))
        leave.set()
        chained.wait()
        store.set("left", "")
        work.wait()
    else:
        store.wait(["hung"], timedelta(seconds=30))
        dist.all_reduce(torch.ones(3))
        store.wait(["left"], timedelta(seconds=30))
        dist.all_reduce(torch.ones(3))
    x = torch.ones(3)
    dist.all_reduce(x)
    close(ctx, x, torch.full((3,), float(ctx.size)))


def test_a_callback_that_does_not_return(reused, transport, backend):
    if backend == "gloo":
        pytest.skip("gloo's operations do not wait for callbacks")
    reused(2, transport).run_in_group(endless, timeout=1.0)


def last_reference(ctx: Ctx) -> None:
    """The callback holds the last reference to its group, which is destroyed on that thread."""
    group = dist.new_group()
    may_end, ended = threading.Event(), threading.Event()

    def callback(_, group: list = [group]) -> None:  # noqa: B006
        may_end.wait(30)
        threading.Timer(0.2, ended.set).start()

    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    future = work.get_future()
    if future.done():
        may_end.set()  # then() runs the callback in this thread
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


def destroyed(ctx: Ctx) -> None:
    """A call that waits for a callback runs although its group is destroyed meanwhile."""
    group = dist.new_group()
    x = torch.ones(3)
    first = dist.all_reduce(torch.ones(2), group=group, async_op=True).get_future()
    first.then(lambda _: time.sleep(0.3))
    last = dist.all_reduce(x, group=group, async_op=True)
    dist.destroy_process_group(group)
    last.wait()
    close(ctx, x, torch.full((3,), float(ctx.size)))


@pytest.mark.worlds(2)
def test_a_held_call_of_a_group_that_is_destroyed(world):
    world.run(destroyed)


# How a callback waits for an operation that the program has called.
WAITS: dict[str, Callable[[dist.Work], None]] = {
    "work": lambda work: work.wait() and None,
    "future": lambda work: work.get_future().wait() and None,
    "poll": lambda work: poll(work.is_completed),
    "poll the future": lambda work: poll(work.get_future().done),
}


def poll(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_done():
        if time.monotonic() > end:
            raise TimeoutError("the operation did not end")
        time.sleep(0.001)


def waiting(ctx: Ctx, how: str, asks_before: bool) -> None:
    """A callback waits for operations that were called before it was added to its future."""
    chance = ctx.random(ctx.rank)
    wait = WAITS[how]
    group = dist.new_group()
    for _ in range(10):
        xs = [torch.full((size,), 1.0) for size in (3, 4, 5)]
        seen = []
        time.sleep(chance.choice((0, 0.002)))
        first, second, third = (dist.all_reduce(x, group=group, async_op=True) for x in xs)
        future = first.get_future()
        if asks_before:
            second.get_future()
            third.get_future()
        fourth = dist.all_reduce(torch.ones(6), group=group, async_op=True)

        def after(_, wait=wait, works=(third, second, fourth), xs=xs) -> float:
            for work in works:
                wait(work)
            return sum(float(x[0]) for x in xs)

        chained = future.then(after)
        second.get_future().add_done_callback(seen.append)
        later = torch.ones(7)
        time.sleep(chance.choice((0, 0.002)))
        dist.all_reduce(later, group=group)
        ctx.equal(chained.wait(), 3.0 * ctx.size)
        poll(lambda seen=seen: len(seen) == 1)
        close(ctx, later, torch.full((7,), float(ctx.size)))
    dist.destroy_process_group(group)


@pytest.mark.parametrize(
    "asks_before", [True, False], ids=["future made before", "future made there"]
)
@pytest.mark.parametrize("how", WAITS)
@pytest.mark.worlds(2, 3)
def test_a_callback_that_waits(world, how, asks_before):
    world.run(waiting, how, asks_before)


def late(ctx: Ctx, how: str) -> None:
    """A callback waits for an operation that the program has called while the callback ran."""
    token = torch.zeros(1)
    called = threading.Event()
    works: list[dist.Work] = []

    def after(_: torch.futures.Future) -> str:
        called.wait(30)
        WAITS[how](works[0])
        return "waited"

    if ctx.rank == 0:
        chained = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(after)
        works.append(dist.all_reduce(torch.ones(4), async_op=True))
        called.set()
        dist.send(token, 1)  # rank 1 calls the first one when it has received this
        ctx.equal(chained.wait(), "waited")
    else:
        dist.recv(token, 0)
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(4))


@pytest.mark.parametrize("how", ["work", "poll"])
@pytest.mark.worlds(2)
def test_a_callback_that_waits_for_a_later_call(world, how):
    world.run(late, how)


def one_order(ctx: Ctx, seed: int) -> None:
    """Runs a random program, the same on all ranks, at random speeds. All ranks must run all
    operations, including those started in callbacks, in one order, without a deadlock."""
    plan = ctx.random(("plan", seed))  # the same on all ranks
    chance = ctx.random((ctx.rank, seed))
    group = dist.new_group()
    sizes = iter(range(1, 10_000))  # operations in another order would differ
    works: list[dist.Work] = []
    futures: list[torch.futures.Future] = []
    results: list[torch.Tensor] = []
    chained: list[torch.futures.Future] = []

    def begin() -> dist.Work:
        x = torch.ones(next(sizes))
        results.append(x)
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        return work

    def start() -> None:
        works.append(begin())
        if plan.random() < 0.6:
            futures.append(works[-1].get_future())

    def callback() -> Callable[[torch.futures.Future], None]:
        awaited = [
            (plan.choice(list(WAITS)), plan.choice(works)) for _ in range(plan.choice((0, 1, 1, 2)))
        ]
        waits_first, waits_for_its_own = plan.random() < 0.5, plan.random() < 0.5
        mine = torch.ones(next(sizes)) if plan.random() < 0.6 else None

        def run(_: torch.futures.Future) -> None:
            time.sleep(chance.choice((0, 0, 0.003)))
            for how, work in awaited if waits_first else []:
                WAITS[how](work)
            if mine is not None:
                results.append(mine)
                work = dist.all_reduce(mine, group=group, async_op=True)
                if waits_for_its_own:
                    work.wait()
            for how, work in [] if waits_first else awaited:
                WAITS[how](work)

        return run

    for _ in range(60):
        time.sleep(chance.choice((0, 0, 0, 0.002)))
        action = plan.choice(("start", "start", "hang", "hang", "hang several", "synchronous"))
        if action == "synchronous":
            x = torch.ones(next(sizes))
            results.append(x)
            dist.all_reduce(x, group=group)
        elif action == "start" or len(futures) < 3:
            start()
        else:
            count = 1 if action == "hang" else 3
            first = plan.randrange(max(0, len(futures) - 6), len(futures) - count + 1)
            # In the order in which the futures were made: see CallbackOrder.
            for future in futures[first : first + count]:
                chained.append(future.then(callback()))
            start()
    for future in chained:
        future.wait()
    for work in works:
        work.wait()
    dist.all_reduce(torch.ones(next(sizes)), group=group)
    for x in results:
        close(ctx, x, torch.full_like(x, float(ctx.size)), f"operation of {x.numel()} elements")
    dist.destroy_process_group(group)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.worlds(2, 3)
def test_one_order_of_operations(world, seed):
    if world.backend == "gloo":
        pytest.skip("gloo's callbacks run in no order")
    world.run(one_order, seed)
