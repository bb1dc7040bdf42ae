"""The layer between torch and the engine: callbacks, hooks, profiler, fork, process exit."""

from __future__ import annotations

import copy
import os
import random
import textwrap
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import mycoll
import pytest
import torch
import torch.distributed as dist
from jobs.forks import calls_of_work, refused_in_a_child
from jobs.hooks import helper_threads, hooks_that_raise
from worlds import warm
from worlds.smoke import smoke
from worlds.worker import Ctx

pytestmark = pytest.mark.transports("shm")


def each_operation(ctx: Ctx) -> None:
    smoke(ctx.rank, ctx.size)


@pytest.mark.quick
@pytest.mark.worlds(2, 4, tcp=(4,))
def test_each_operation(world):
    world.run(each_operation)


CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _only_for_mycoll(backend):
    if backend != "mycoll":
        pytest.skip("specific to mycoll")


def mycoll_threads() -> list[str]:
    names = [p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name.startswith("mycoll")]


# --- futures


def callbacks_that_wait(ctx: Ctx) -> None:
    """A callback may start operations and wait for them, also through further futures."""

    def nested(done: torch.futures.Future) -> torch.Tensor:
        first = done.value()[0]
        second = dist.all_reduce(torch.ones(100), async_op=True).get_future()
        third = second.then(lambda f: f.value()[0] + first)
        return third.wait()

    for round_ in range(3):
        future = dist.all_reduce(torch.full((100,), float(round_)), async_op=True).get_future()
        ctx.equal(float(future.then(nested).wait()[0]), float(ctx.size * (round_ + 1)))
    # The thread for callbacks ends when it is no longer needed.
    deadline = time.monotonic() + 10
    while "mycoll-callback" in mycoll_threads() and time.monotonic() < deadline:
        time.sleep(0.1)
    ctx.equal([name for name in mycoll_threads() if name == "mycoll-callback"], [])


@pytest.mark.worlds(2, 3)
def test_callbacks_may_wait_for_operations(world):
    world.run(callbacks_that_wait)


# --- threads


@pytest.mark.worlds(2)
def test_helper_threads(world):
    world.run(helper_threads)


# --- hooks, timing, profiler


def completion_hooks(ctx: Ctx) -> None:
    group = dist.new_group()
    seen: list[tuple[str, int]] = []
    group._register_on_completion_hook(lambda info: seen.append((info.op_type.name, info.seq)))
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group, async_op=True)
    dist.barrier(group=group)
    group._wait_for_pending_works()
    ctx.equal(
        sorted(seen, key=lambda s: s[1]), [("ALLREDUCE", 0), ("ALLREDUCE", 1), ("BARRIER", 2)]
    )
    dist.destroy_process_group(group)


@pytest.mark.worlds(2)
def test_completion_hooks(world):
    world.run(completion_hooks)


FAILURES = (ValueError, SystemExit, KeyboardInterrupt)


@pytest.mark.worlds(2)
def test_completion_hooks_that_raise(world):
    world.run(hooks_that_raise, FAILURES)


def callbacks_that_raise(ctx: Ctx) -> None:
    """Later callbacks and collectives run although a callback raises."""
    for failure in FAILURES:
        called: list[str] = []

        def fail(_: torch.futures.Future, failure=failure) -> None:
            raise failure("my callback is wrong")

        work = dist.all_reduce(torch.ones(3), async_op=True)
        future = work.get_future()
        chained = future.then(fail)
        future.add_done_callback(fail)
        future.add_done_callback(lambda _, called=called: called.append("future"))
        result = work.get_future_result()
        result.add_done_callback(fail)
        result.add_done_callback(lambda _, called=called: called.append("result"))
        with ctx.raises((RuntimeError, failure), "my callback is wrong"):
            chained.wait()
        work.wait()
        x = torch.ones(3)
        dist.all_reduce(x)
        ctx.equal(x.tolist(), [float(ctx.size)] * 3)
        end = time.monotonic() + 20
        while len(called) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        ctx.equal(sorted(called), ["future", "result"])


@pytest.mark.worlds(2)
def test_callbacks_that_raise(world):
    world.run(callbacks_that_raise)


def timed(ctx: Ctx) -> None:
    group = dist.new_group()
    group._enable_collectives_timing()
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    work.wait()
    milliseconds = work._get_duration()
    if not 0 < milliseconds < 60_000:
        ctx.fail(f"a duration of {milliseconds} ms")
    dist.destroy_process_group(group)


@pytest.mark.worlds(2)
def test_durations(world):
    world.run(timed)


def profiled(ctx: Ctx) -> None:
    x = torch.ones(4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.all_gather_into_tensor(torch.empty(4 * ctx.size), x)
        request = dist.isend(x, (ctx.rank + 1) % ctx.size)
        dist.recv(torch.empty(4), (ctx.rank - 1) % ctx.size)
        request.wait()
    names = [event.name for event in profile.events()]
    for name, count in (
        ("mycoll:all_reduce", 2),
        ("mycoll:all_gather_into_tensor", 1),
        ("mycoll:send", 1),
        ("mycoll:recv", 1),
        ("record_param_comms", 5),
    ):
        ctx.equal((name, names.count(name)), (name, count))


@pytest.mark.worlds(2)
def test_profiler_events(world):
    world.run(profiled)


# --- modes of torch


def under_modes(ctx: Ctx) -> None:
    with torch.inference_mode():
        frozen = torch.ones(3, 4)
    with ctx.case("inference tensors, outside of inference mode"):
        dist.all_reduce(frozen.t())
        ctx.equal(float(frozen[0, 0]), float(ctx.size))
    with ctx.case("a leaf that requires grad"):
        leaf = torch.nn.Parameter(torch.ones(4, 5))
        dist.all_reduce(leaf, async_op=True).wait()
        ctx.equal((float(leaf.detach()[0, 0]), leaf.is_leaf), (float(ctx.size), True))
    with ctx.case("CommDebugMode"):
        from torch.distributed.tensor.debug import CommDebugMode

        with CommDebugMode() as mode:
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(2, 3).t(), async_op=True).wait()
        ctx.equal(mode.get_total_counts(), 2)


@pytest.mark.worlds(2)
def test_modes(world):
    world.run(under_modes)


# --- a coalesced block that raises


def broken_batch(ctx: Ctx) -> None:
    backend = dist.group.WORLD._get_backend(CPU)
    for _ in range(3):
        try:
            with dist._coalescing_manager(device=CPU, async_ops=True):
                dist.all_reduce(torch.ones(2), async_op=True)
                raise KeyError("in the middle")
        except KeyError:
            pass
        x = torch.ones(1000)
        dist.all_reduce(x)  # completes, although torch never ended the batch
        ctx.equal(float(x[-1]), float(ctx.size))
    with ctx.raises((ValueError, RuntimeError)):
        backend._end_coalescing()
        backend._end_coalescing()


@pytest.mark.worlds(2)
def test_an_exception_in_a_batch(world):
    world.run(broken_batch)


# --- layouts


def random_view(choose: random.Random, x: torch.Tensor) -> torch.Tensor:
    for _ in range(choose.randint(0, 3)):
        kind = choose.choice(("permute", "slice", "unsqueeze"))
        if kind == "permute" and x.dim():
            x = x.permute(choose.sample(range(x.dim()), x.dim()))
        elif kind == "slice" and x.dim():
            part = slice(choose.randint(0, 1), None, choose.randint(1, 3))
            x = x[(slice(None),) * choose.randrange(x.dim()) + (part,)]
        elif kind == "unsqueeze":
            x = x.unsqueeze(choose.randint(0, x.dim()))
    return x


def any_layout(ctx: Ctx) -> None:
    """With one rank, all_gather copies its input to its output; any strides are accepted."""
    choose = random.Random(1)
    torch.manual_seed(1)
    backend = dist.group.WORLD._get_backend(CPU)
    dtypes = (torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex64)
    for case in range(1500):
        dtype = choose.choice(dtypes)
        shape = [choose.choice((1, 2, 3, 9, 70)) for _ in range(choose.randint(0, 3))]
        x = random_view(choose, (torch.randn(shape) * 50).to(dtype))
        if choose.random() < 0.2:
            x = x.expand(4, *x.shape)
        if dtype.is_complex and choose.random() < 0.5:
            x = x.conj()
        order = choose.sample(range(x.dim()), x.dim())
        back = [order.index(i) for i in range(x.dim())]
        whole = torch.zeros([2 * x.shape[i] + 1 for i in order], dtype=dtype).permute(back)
        step = choose.choice((1, 2))
        out = whole[tuple(slice(0, step * size, step) for size in x.shape)]
        backend.allgather([[out]], [x]).wait()
        if not torch.equal(out, x) or torch.count_nonzero(whole) != torch.count_nonzero(x):
            ctx.fail(f"case {case}: {dtype} {tuple(x.shape)} {x.stride()} into {out.stride()}")


@pytest.mark.worlds(1)
def test_any_layout(world):
    world.run(any_layout)


# --- options


def test_options(backend):
    import mycoll

    options = mycoll.Options(timeout=timedelta(seconds=5), cpu="engine")
    for twin in (copy.copy(options), copy.deepcopy(options)):
        assert twin is not options
        assert (twin.cpu, twin.timeout) == ("engine", timedelta(seconds=5))
        assert twin.shutdown_timeout == timedelta(seconds=10)
        assert twin.warn_after == timedelta(seconds=1)
    assert "5 s" in repr(options) and "engine" in repr(options)
    with pytest.raises(ValueError, match="cpu"):
        mycoll.Options(cpu="abacus")
    for name in ("shutdown_timeout", "warn_after"):
        setattr(options, name, timedelta(milliseconds=70))
        assert getattr(copy.copy(options), name) == timedelta(milliseconds=70)
        assert f"{name}=0.07 s" in repr(options)
        with pytest.raises(ValueError, match=f"{name} must not be negative"):
            setattr(options, name, timedelta(seconds=-1))
        with pytest.raises(ValueError, match=f"{name} must not be negative"):
            mycoll.Options(**{name: timedelta(seconds=-1)})
    for name, message in (
        ("tiemout", "no field 'tiemout'; did you mean 'timeout'"),
        ("nccl", "options.nccl.min_ctas"),
        ("bandwidth", "it has timeout, shutdown_timeout, warn_after and cpu"),
    ):
        with pytest.raises(TypeError, match=message):
            mycoll.Options(**{name: 1})


# --- fork and the end of a process


def forked(ctx: Ctx) -> None:
    x = torch.ones(3)
    dist.all_reduce(x)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            dist.all_reduce(x)
            text = "no error"
        except RuntimeError as error:
            text = str(error)
        try:
            dist.destroy_process_group()
            dist.init_process_group(ctx.backend, store=dist.HashStore(), rank=0, world_size=1)
            dist.all_reduce(x)
            text += ", and made its own group"
        except BaseException as error:
            text += f"; then {error!r}"
        os.write(write, text.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    text = os.read(read, 4096).decode()
    if not all(words in text for words in ("forked", "all_reduce", "made its own group")):
        ctx.fail(f"in the child: {text}")
    dist.all_reduce(x)  # the parent is not affected
    ctx.equal(float(x[0]), float(ctx.size**2))


def test_a_forked_child_is_refused(reused, transport):
    reused(2, transport).run_in_group(forked)


def calls_of_window(window: mycoll.Window, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    return {
        "tensor_register": lambda: window.tensor_register(x),
        "tensor_deregister": window.tensor_deregister,
        "put": lambda: window.put(x, 0, 0, True),
        "signal": lambda: window.signal(0, True),
        "wait_signal": lambda: window.wait_signal(0, False),
        "map_remote_tensor": lambda: window.map_remote_tensor(0),
        "get_attr": lambda: window.get_attr(0),
        "new_window": lambda: mycoll.new_window(x),
    }


def calls_of_group(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    world = dist.group.WORLD
    backend = world._get_backend(CPU)
    name, minute = world.group_name, timedelta(minutes=1)
    ops = torch.ops.mycoll
    return {
        "barrier": dist.barrier,
        "monitored_barrier": lambda: dist.monitored_barrier(timeout=minute),
        "batch_isend_irecv": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0)]),
        "_coalescing_manager": lambda: backend._start_coalescing(),
        "all_gather_object": lambda: dist.all_gather_object([None] * dist.get_world_size(), 1),
        "operator all_reduce": lambda: ops.all_reduce(x, name),
        "operator all_reduce_": lambda: ops.all_reduce_(x, name),
        "operator all_gather": lambda: ops.all_gather(x, name),
        "operator reduce_scatter": lambda: ops.reduce_scatter(torch.ones(4), name),
        "abort": backend.abort,
        "timeout": lambda: dist.distributed_c10d._set_pg_timeout(minute, world),
        "timing": world._enable_collectives_timing,
        "hook": lambda: world._register_on_completion_hook(lambda _: None),
        "pending works": world._wait_for_pending_works,
    }


def forked_with_works(ctx: Ctx) -> None:
    """Each call is refused in a forked child, also on operations that the parent has started."""
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    window = mycoll.new_window(torch.zeros(4))
    done = dist.all_reduce(torch.ones(3), async_op=True)
    done.wait()
    asked = dist.all_reduce(torch.ones(3), async_op=True)
    future = asked.get_future()
    asked.wait()
    dist.barrier()
    started = {
        "a receive": dist.irecv(torch.ones(3), left, tag=1),
        "a signal": window.wait_signal(left, True),
    }
    if ctx.rank == 0:
        started["a collective"] = dist.all_reduce(torch.ones(3), async_op=True)
    calls = calls_of_window(window, torch.ones(3)) | calls_of_group(torch.ones(3))
    for name, work in {"a completed work": done, "a work with a future": asked, **started}.items():
        calls |= calls_of_work(name, work)
    refused_in_a_child(ctx, calls, started)
    ctx.equal(len(future.value()), 1)
    if ctx.rank != 0:
        dist.all_reduce(torch.ones(3))
    dist.isend(torch.ones(3), right, tag=1)
    window.put(torch.ones(1), right, 0, False)
    window.signal(right, False)
    for work in started.values():
        work.wait()
    window.tensor_deregister()


@pytest.mark.parametrize("over", ["shm", "tcp"])
def test_works_in_a_forked_child(reused, over):
    reused(2, over).run_in_group(forked_with_works)


BEGIN = """
import sys, time, torch, torch.distributed as dist, mycoll
rank = int(sys.argv[1])
meeting = f"file://{sys.argv[2]}"
dist.init_process_group("mycoll", init_method=meeting, rank=rank, world_size=2)
x = torch.ones(3)
dist.all_reduce(x)
"""
ENDS = {
    "without destroy": "",
    "with work in flight": "keep = dist.irecv(x, 1 - rank, tag=9)",
    "with a future in flight": """
        keep = dist.irecv(x, 1 - rank, tag=9).get_future().then(lambda f: None)
    """,
    "in the middle of a callback": """
        keep = dist.irecv(x, 1 - rank, tag=9).get_future().then(lambda f: time.sleep(60))
        dist.barrier()  # a callback of a completed operation would run in this thread
        dist.isend(torch.ones(3), 1 - rank, tag=9)
        time.sleep(0.3)
    """,
    "by an exception": "raise SystemExit(0)",
}


@pytest.mark.parametrize("name", ENDS)
def test_process_ends(backend, tmp_path, transport, name):
    """A process exits promptly and with status 0, whatever is unfinished."""
    code = BEGIN + textwrap.dedent(ENDS[name])
    started = time.monotonic()
    ranks = [
        warm.start(
            code,
            str(rank),
            str(tmp_path / "meeting"),
            environment=os.environ | {"MYCOLL_TRANSPORT": transport},
            to_the_end=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            output = process.communicate(timeout=45)
            assert process.returncode == 0, output
    finally:
        for process in ranks:
            process.kill()
    assert time.monotonic() - started < 40
