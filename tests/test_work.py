"""The methods of Work that torch.distributed documents: waiting, querying, chaining, dropping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import jobs.gil
import pytest
import torch
import torch.distributed as dist
from faults.harness import Seen, attempt
from jobs.work import dropped, freed_at_once, other_orders, wait_with_enough_time
from worlds import arith
from worlds.worker import Ctx

pytestmark = pytest.mark.transports("shm")

NUMEL = 100_003


def operations(ctx: Ctx) -> dict[str, tuple]:
    """name -> (start it, check its result), one of each kind of collective."""
    parts = ctx.inputs(torch.float32, NUMEL)
    total = arith.reduced("SUM", parts)
    x, y, z = (parts[ctx.rank].clone() for _ in range(3))
    outs = [torch.zeros(NUMEL) for _ in parts]
    flat = torch.zeros(NUMEL * ctx.size)
    rows = torch.cat([parts[ctx.rank]] * ctx.size)
    piece = torch.zeros(NUMEL)

    def each(got, want) -> None:
        for g, w in zip(got, want, strict=True):
            ctx.same(g, w)

    found = {
        "all_reduce": (lambda: dist.all_reduce(x, async_op=True), lambda: ctx.same(x, total)),
        "broadcast": (
            lambda: dist.broadcast(y, 0, async_op=True),
            lambda: ctx.same(y, parts[0]),
        ),
        "all_gather": (
            lambda: dist.all_gather(outs, z, async_op=True),
            lambda: each(outs, parts),
        ),
        "all_gather_into_tensor": (
            lambda: dist.all_gather_into_tensor(flat, z, async_op=True),
            lambda: ctx.same(flat, torch.cat(parts)),
        ),
        "reduce_scatter_tensor": (
            lambda: dist.reduce_scatter_tensor(piece, rows, async_op=True),
            lambda: ctx.same(piece, total),
        ),
        "barrier": (lambda: dist.barrier(async_op=True), lambda: None),
    }
    return {name: pair for name, pair in found.items() if not ctx.skips(f"work/{name}")}


def states(ctx: Ctx) -> None:
    for name, (start, check) in operations(ctx).items():
        with ctx.case(name):
            work = start()
            ctx.equal(work.wait(), True, "wait()")
            ctx.equal(work.is_completed(), True, "is_completed()")
            ctx.equal(work.is_success(), True, "is_success()")
            # Before 2.12 torch's binding of exception() fails for every backend.
            if torch.__version__ >= "2.12":
                ctx.equal(work.exception(), None, "exception()")
            work.synchronize()
            check()
            ctx.equal(work.wait(), True, "a second wait()")


@pytest.mark.worlds(1, 2, 3)
def test_states_of_finished_work(world):
    world.run(states)


def polled(ctx: Ctx) -> None:
    """Work finishes although no thread waits for it."""
    for name, (start, check) in operations(ctx).items():
        with ctx.case(name):
            work = start()
            end = time.monotonic() + 30
            while not work.is_completed():
                if time.monotonic() > end:
                    raise TimeoutError("is_completed() never became true")
                time.sleep(0.001)
            check()


@pytest.mark.worlds(1, 2, 3)
def test_work_finishes_unwaited(world):
    world.run(polled)


def futures(ctx: Ctx) -> None:
    for name, (start, check) in operations(ctx).items():
        with ctx.case(name):
            called = threading.Event()
            future = start().get_future()
            chained = future.then(lambda f, called=called: (f.value(), called.set(), 5)[-1])
            ctx.equal(chained.wait(), 5)
            ctx.equal(called.is_set(), True)
            check()
    with ctx.case("value"):
        x = torch.full((3,), float(ctx.rank))
        value = dist.all_reduce(x, async_op=True).get_future().wait()
        ctx.equal(isinstance(value, list), True, "a list of tensors:")
        ctx.same(value[0], x)
        ctx.equal(float(x[0]), float(sum(range(ctx.size))))
    with ctx.case("then on top of then"):
        x = torch.ones(10)
        future = dist.all_reduce(x, async_op=True).get_future()
        half = future.then(lambda f: f.value()[0] / 2).then(lambda f: f.value() * 4)
        ctx.same(half.wait(), torch.full((10,), 2.0 * ctx.size))


@pytest.mark.worlds(1, 2, 3)
def test_futures(world):
    world.run(futures)


def results(ctx: Ctx) -> None:
    x = torch.full((5,), float(ctx.rank))
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    ctx.same(work.result()[0], x)
    y = torch.full((5,), float(ctx.rank))
    work = dist.broadcast(y, 1, async_op=True)
    work.wait()
    ctx.same(work.result()[0], torch.ones(5))


@pytest.mark.worlds(2)
def test_result(world):
    world.run(results)


def source_ranks(ctx: Ctx) -> None:
    x = torch.zeros(4)
    if ctx.rank == 0:
        work = dist.distributed_c10d._get_default_group().recv_anysource([x], 3)
        work.wait()
        ctx.equal(work._source_rank(), 1)
    elif ctx.rank == 1:
        dist.send(torch.ones(4), 0, tag=3)


@pytest.mark.worlds(2)
def test_source_rank(world):
    world.run(source_ranks)


def timeouts(ctx: Ctx) -> float:
    """A wait that times out raises promptly."""
    if ctx.rank == 0:
        started = time.monotonic()
        work = dist.all_reduce(torch.ones(10), async_op=True)
        with ctx.raises((RuntimeError, dist.DistBackendError)):
            work.wait(timedelta(seconds=0.5))
        took = time.monotonic() - started
        ctx.store("timeouts").set("done", "")
        return took
    ctx.store("timeouts").wait(["done"], timedelta(seconds=30))
    return 0.5


def test_wait_with_a_timeout(reused, transport):
    took = reused(2, transport).run_in_group(timeouts)[0]
    assert 0.45 < took < 15


def polled_too_long(ctx: Ctx, name: str) -> None:
    """No thread waits for the operation, and its future is not used."""
    x = torch.ones(10)
    store = ctx.store("polled")
    if ctx.rank == 0:
        work = dist.irecv(x, 1) if name == "irecv" else dist.all_reduce(x, async_op=True)
        assert work is not None
        end = time.monotonic() + 20
        while work.is_success() and work.exception() is None and time.monotonic() < end:
            time.sleep(0.01)
        ctx.equal(work.is_success(), False)
        ctx.equal("timed out" in str(work.exception()), True, f"{work.exception()}")
        ctx.equal(work.is_completed(), True)
        store.set("done", "")
    else:
        store.wait(["done"], timedelta(seconds=30))


@pytest.mark.parametrize("name", ["all_reduce", "irecv"])
def test_timeout_of_polled_work(reused, transport, name, mycoll_only):
    reused(2, transport).run_in_group(polled_too_long, name, timeout=0.5)


def posted_early(ctx: Ctx) -> None:
    """The timeout of a message starts when the program waits for it."""
    x = torch.zeros(10)
    if ctx.rank == 0:
        work = dist.irecv(x, 1)
        time.sleep(0.9)
    else:
        time.sleep(0.9)
        work = dist.isend(x + 3, 0)
    assert work is not None
    work.wait()
    if ctx.rank == 0:
        ctx.equal(x.unique().tolist(), [3])


def test_a_message_may_be_posted_long_before_the_wait(reused, transport):
    reused(2, transport).run_in_group(posted_early, timeout=0.5)


def group_timeouts(ctx: Ctx, name: str) -> str:
    x = torch.ones(10)
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "barrier": dist.barrier,
        "recv": lambda: dist.recv(x, 1),
        "broadcast": lambda: dist.broadcast(x, 1),
    }
    text = ""
    if ctx.rank == 0:
        try:
            calls[name]()
        except RuntimeError as error:
            text = str(error)
        ctx.store("timeouts").set("done", "")
    else:
        ctx.store("timeouts").wait(["done"], timedelta(seconds=30))
    return text


@pytest.mark.parametrize("name", ["all_reduce", "barrier", "recv", "broadcast"])
def test_timeout_of_the_group(reused, transport, name):
    text = reused(2, transport).run_in_group(group_timeouts, name, timeout=0.5)[0]
    assert text, "no exception"
    assert "tim" in text.lower(), text


@pytest.mark.worlds(2)
def test_wait_with_enough_time(world):
    world.run(wait_with_enough_time)


@pytest.mark.worlds(2, 3)
def test_waited_in_other_orders_and_threads(world):
    world.run(other_orders)


@pytest.mark.worlds(2, 3)
def test_work_and_tensors_dropped(world):
    world.run(dropped)


@pytest.mark.worlds(2, 3)
def test_inputs_freed_after_the_call(world):
    world.run(freed_at_once)


def sequence_numbers(ctx: Ctx) -> list[int]:
    group = dist.new_group()
    backend = group._get_backend(torch.device("cpu"))
    before = backend._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=group)
    after = backend._get_sequence_number_for_group()
    ctx.equal(after - before, 3, "sequence numbers used")
    dist.destroy_process_group(group)
    return [after]


@pytest.mark.worlds(2, 3)
def test_sequence_numbers(world):
    assert len({str(numbers) for numbers in world.run(sequence_numbers)}) == 1


def overlap(ctx: Ctx) -> None:
    """An async collective proceeds while Python computes, without a wait()."""
    x = torch.ones(2_000_000)
    work = dist.all_reduce(x, async_op=True)
    end = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < end:
        sum(range(1000))  # holds the GIL nearly all the time
    ctx.equal(work.is_completed(), True)
    ctx.equal(float(x[-1]), float(ctx.size))


@pytest.mark.worlds(2)
def test_overlap_with_computing(world):
    world.run(overlap)


LARGE = 1 << 20


def strided(numel: int) -> torch.Tensor:
    return torch.ones(numel, 2)[:, 0]


def numpy_backed(numel: int) -> torch.Tensor:
    return torch.from_numpy(torch.ones(numel).numpy().copy())


def known_storage(numel: int) -> torch.Tensor:
    """A tensor whose storage also has a Python object, which needs the GIL to be dropped."""
    x = torch.ones(numel)
    x.keeper = x.untyped_storage()  # type: ignore[attr-defined]
    return x


def sparse(numel: int) -> torch.Tensor:
    return torch.ones(numel).to_sparse()


# name -> starts an operation whose tensors are referenced only by the operation and its Work.
UNKEPT: dict[str, Callable[[Ctx], Any]] = {
    "reduce_scatter_tensor": lambda ctx: dist.reduce_scatter_tensor(
        torch.empty(LARGE), torch.ones(LARGE * ctx.size), async_op=True
    ),
    "reduce_scatter": lambda ctx: dist.reduce_scatter(
        torch.empty(LARGE), [torch.ones(LARGE) for _ in range(ctx.size)], async_op=True
    ),
    "all_gather_into_tensor": lambda ctx: dist.all_gather_into_tensor(
        torch.empty(LARGE * ctx.size), torch.ones(LARGE), async_op=True
    ),
    "all_to_all_single": lambda ctx: dist.all_to_all_single(
        torch.empty(LARGE), torch.ones(LARGE), async_op=True
    ),
    "a strided output": lambda ctx: dist.all_reduce(strided(LARGE), async_op=True),
    "a numpy array": lambda ctx: dist.all_reduce(numpy_backed(LARGE), async_op=True),
    "a known storage": lambda ctx: dist.all_gather_into_tensor(
        torch.empty(LARGE * ctx.size), known_storage(LARGE), async_op=True
    ),
    "a sparse tensor": lambda ctx: dist.all_reduce(sparse(LARGE // 16), async_op=True),
    "messages": lambda ctx: (
        dist.isend(torch.ones(4 * LARGE), 1)
        if ctx.rank == 0
        else dist.irecv(torch.empty(4 * LARGE), 0)
    ),
}


def while_the_gil_is_held(ctx: Ctx, name: str, keeps: bool) -> None:
    """Operations proceed without the GIL, whatever holds their tensors last."""
    jobs.gil.proceeds(ctx, lambda: [UNKEPT[name](ctx) for _ in range(4)], keeps)


@pytest.mark.parametrize("keeps", [True, False], ids=["works kept", "works dropped"])
@pytest.mark.parametrize("name", UNKEPT)
@pytest.mark.worlds(2)
def test_operations_beside_a_held_gil(world, name, keeps):
    world.run(while_the_gil_is_held, name, keeps)


def futures_made_before(ctx: Ctx, kind: str) -> None:
    """After a wait for the Work, its future has a value, and its callbacks have run."""
    other = (ctx.rank + 1) % ctx.size
    for step in range(200):
        x = torch.full((4,), float(step))
        if kind == "all_reduce":
            work = dist.all_reduce(x, async_op=True)
        elif ctx.rank == 0:
            work = dist.isend(x, other)
        else:
            work = dist.irecv(x, other)
        future, seen = work.get_future(), []
        future.add_done_callback(seen.append)
        if step % 2:
            work.wait()
            ctx.equal(len(seen), 1, "callbacks that have run")
        else:
            while not work.is_completed():
                pass
        ctx.equal(future.done(), True)
        ctx.equal(float(future.value()[0][0]), step * (ctx.size if kind == "all_reduce" else 1))


@pytest.mark.parametrize("kind", ["all_reduce", "messages"])
@pytest.mark.worlds(2)
def test_a_future_is_complete_when_its_work_is(world, kind):
    if world.backend == "gloo" and kind == "messages":
        pytest.skip("gloo has no futures of messages")
    world.run(futures_made_before, kind)


def futures_of_messages(ctx: Ctx) -> Seen:
    """Rank 0 waits only for the future, and rank 1 does not send."""
    dist.barrier()
    if ctx.rank == 1:
        ctx.store("futures").wait(["done"], timedelta(seconds=60))
        return attempt(lambda: None)
    work = dist.irecv(torch.ones(3), 1)
    assert work is not None
    seen = attempt(work.get_future().wait)
    ctx.store("futures").set("done", "")
    return seen


def test_a_future_of_a_message_times_out(reused, transport, backend):
    if backend == "gloo":
        pytest.skip("gloo has no futures of messages")
    seen = reused(2, transport).run_in_group(futures_of_messages, timeout=0.5)[0]
    assert "timed out" in seen.text and "recv from rank 1" in seen.text, seen
    assert 0.45 < seen.seconds < 10.0
