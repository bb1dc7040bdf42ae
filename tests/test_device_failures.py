"""What goes wrong with device tensors raises in Python, soon, on every rank, and says who and what;
and a group can always be left."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import test_mismatch
import test_work
import torch
import torch.distributed as dist
from worlds import device
from worlds.worker import Ctx

ROADS = ("nccl", "host")
SOON = 20.0  # seconds


def full(ctx: Ctx, value: float, numel: int = 1000) -> torch.Tensor:
    return torch.full((numel,), float(value), device=ctx.device)


def text_of_failure(ctx: Ctx, seconds: float = SOON) -> tuple[str, float]:
    """What this rank gets to hear, sooner or later, from calls that it makes anyway."""
    started = time.monotonic()
    try:
        while time.monotonic() - started < seconds:
            dist.all_reduce(full(ctx, 1))
            torch.accelerator.synchronize()
            time.sleep(0.01)
    except (dist.DistBackendError, RuntimeError) as error:
        return str(error), time.monotonic() - started
    return "", seconds


# --- ranks that disagree


def disagree(ctx: Ctx, name: str) -> tuple[str, float]:
    with ctx.device:
        text, took = test_mismatch.disagree(ctx, name)
    # Where NCCL itself does not notice, ranks compare their calls behind its back, and a rank hears
    # of it with one of its next calls.
    return (text, took) if text else text_of_failure(ctx)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(
    "name", ["operation", "dtype", "size", "size, large", "reduce op", "root", "async"]
)
def test_mismatch_on_device(fresh_device_world, road, name):
    for text, took in fresh_device_world(2, road).run(disagree, name):
        for part in test_mismatch.MISMATCHES[name].texts:
            assert part.lower() in text.lower(), text
        assert took < SOON, f"{took:.1f} s until: {text}"


# --- a rank that dies, and one that does not come


def outlive(ctx: Ctx) -> tuple[str, float]:
    x = full(ctx, 1)
    dist.all_reduce(x)
    torch.accelerator.synchronize()
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(x, async_op=True)
    return text_of_failure(ctx)


@pytest.mark.parametrize("road", ROADS)
def test_a_dead_rank_is_named(fresh_device_world, road):
    world = fresh_device_world(3, road)
    world.start(outlive)
    answers = world.finish(allow_gone=True)
    for rank in (0, 2):
        text, took = answers[rank]
        assert "rank 1" in text, text
        assert took < SOON, f"{took:.1f} s until: {text}"


NOT_TO_BE_USED = "What the device has computed since is not to be used"


def believe(ctx: Ctx, how: str) -> str:
    """A result that never came is looked at, after calls that have returned. What this rank gets to
    hear, before it can believe the number."""
    x = full(ctx, 1)
    dist.all_reduce(x)
    torch.accelerator.synchronize()
    if how == "replay":
        graph = device.graph_on(ctx.device)
        with graph.capture():
            dist.all_reduce(x)
        graph.replay()
        torch.accelerator.synchronize()
        time.sleep(1.5)  # nothing is under way for a while
    dist.barrier()
    if ctx.rank == 1:
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
    # Once is enough: who cleans up is left alone.
    ended = time.monotonic() + 0.5
    while time.monotonic() < ended:
        torch.accelerator.synchronize()
    with ctx.raises(dist.DistBackendError, NOT_TO_BE_USED):
        dist.all_reduce(x)
    return text


@pytest.mark.parametrize("how", ["sync", "wait", "future", "replay"])
def test_a_result_that_never_came_is_not_believed(fresh_device_world, how):
    world = fresh_device_world(2, "nccl")
    world.start(believe, how)
    text = world.finish(allow_gone=True)[0]
    assert "rank 1" in text, text
    assert NOT_TO_BE_USED in text, text


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


def test_nobody_is_interrupted_by_a_good_end(fresh_device_world):
    fresh_device_world(2, "nccl").run(ends_in_good_order)


def told_elsewhere(ctx: Ctx) -> str:
    """Another thread hears of the death first, and keeps it to itself."""
    x = full(ctx, 1)
    dist.all_reduce(x)
    other = dist.new_group()
    if ctx.rank == 0:  # no failure, and no reason to believe what comes later
        with ctx.raises(dist.DistBackendError, "timed out"):
            dist.irecv(x.clone(), 1).wait(timedelta(milliseconds=300))
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


def test_each_thread_is_told(fresh_device_world):
    world = fresh_device_world(2, "nccl")
    world.start(told_elsewhere)
    assert NOT_TO_BE_USED in world.finish(allow_gone=True)[0]


def hang_in_nccl(ctx: Ctx, how: str) -> str:
    """NCCL's enqueue waits for the other rank, as the first message to it does; that rank dies."""
    x = full(ctx, 1)
    dist.all_reduce(x)
    if how == "known pair":
        (dist.send if ctx.rank == 0 else dist.recv)(x, 1 - ctx.rank)
    torch.accelerator.synchronize()
    if ctx.rank == 0:
        device.tell_nccl("hang=enqueue")
    dist.barrier()
    if ctx.rank == 1:
        if how == "new pair":
            dist.isend(x, 0)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if how == "collective":
            dist.all_reduce(x)
        elif "pair" in how:
            dist.recv(x, 1)
        else:
            dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1)])[0].wait()
        torch.accelerator.synchronize()
        time.sleep(SOON)
    except dist.DistBackendError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["collective", "new pair", "known pair", "batch"])
def test_a_hang_in_nccl_ends_with_the_rank_it_waits_for(fresh_device_world, request, how):
    if not device.is_scripted(request.config.getoption("--device")):
        pytest.skip("only the stand-in can be told to hang")
    world = fresh_device_world(2, "nccl")
    world.start(hang_in_nccl, how)
    assert "rank 1" in world.finish(allow_gone=True)[0]


def late_beside_destroy(ctx: Ctx) -> None:
    x = full(ctx, ctx.rank + 1)
    dist.all_reduce(full(ctx, 1))
    torch.accelerator.synchronize()
    if ctx.rank == 1:
        time.sleep(11)  # longer than any grace for the end itself
    dist.all_reduce(x)
    dist.destroy_process_group()
    ctx.same(x, torch.full((1000,), 3.0))


def test_destroy_waits_for_what_has_returned(fresh_device_world):
    fresh_device_world(2, "nccl").run(late_beside_destroy)


def without_rank_1(ctx: Ctx, name: str, call: Callable[[], object]) -> tuple[str, float]:
    """The others' call while rank 1 stays away: what they get to hear, and after how long."""
    store = ctx.store(name)
    if ctx.rank == 1:
        store.wait(["done"], timedelta(seconds=40))
        return "", 0.0
    started = time.monotonic()
    try:
        call()
        text, _ = text_of_failure(ctx)
    except RuntimeError as error:
        text = str(error)
    took = time.monotonic() - started
    store.set("done", "")
    return text, took


def miss(ctx: Ctx, kind: str) -> tuple[str, float]:
    """Rank 1 does not come; the others are told which rank is missing from what."""
    x = full(ctx, 1)
    dist.all_reduce(x)
    torch.accelerator.synchronize()

    def call() -> None:
        work = dist.all_reduce(x, async_op=kind == "async")
        if kind == "wait":
            dist.all_reduce(x, async_op=True).wait(timedelta(seconds=2))
        elif work is not None:
            work.wait()

    return without_rank_1(ctx, "miss", call)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("road", ROADS)
def test_a_timeout_names_the_missing_rank(fresh_device_world, road, kind):
    text, took = fresh_device_world(2, road, timeout=3.0).run(miss, kind)[0]
    assert "rank 1" in text, text
    assert "all_reduce" in text, text
    assert 2.0 < took < SOON, f"{took:.1f} s until: {text}"


def unanswered(ctx: Ctx, kind: str) -> tuple[str, float]:
    """Rank 1 never comes to the first message of the two."""
    # The call itself returns, although nobody can have answered.
    return without_rank_1(ctx, "unanswered", lambda: getattr(dist, kind)(full(ctx, 1), 1).wait())


@pytest.mark.parametrize(
    ("road", "kind"), [("nccl", "isend"), ("nccl", "irecv"), ("host", "irecv")]
)
def test_a_message_that_nobody_answers(fresh_device_world, road, kind):
    text, took = fresh_device_world(2, road, timeout=3.0).run(unanswered, kind)[0]
    assert "rank 1" in text, text
    assert "send" in text if kind == "isend" else "recv" in text, text
    assert 2.0 < took < SOON, f"{took:.1f} s until: {text}"


# --- leaving


def leave(ctx: Ctx, how: str) -> float:
    """A group with an operation that will never end."""
    x = full(ctx, 1)
    dist.all_reduce(x)
    torch.accelerator.synchronize()
    work = None
    if ctx.rank == 0:
        with contextlib.suppress(RuntimeError):  # the other one may have aborted by now
            work = dist.all_reduce(x, async_op=True)
    started = time.monotonic()
    with contextlib.suppress(RuntimeError):
        if how == "abort":
            dist.distributed_c10d._get_default_group().abort()
        dist.destroy_process_group()
    took = time.monotonic() - started
    del work
    # Life goes on: a new group of the same ranks.
    ctx.init("again")
    y = full(ctx, ctx.rank)
    dist.all_reduce(y)
    ctx.equal(y.cpu()[0].item(), float(sum(range(ctx.size))), "in a new group")
    return took


@pytest.mark.parametrize("how", ["abort", "destroy"])
@pytest.mark.parametrize("road", ROADS)
def test_a_stuck_group_can_be_left(fresh_device_world, road, how):
    for took in fresh_device_world(2, road, timeout=5.0).run(leave, how):
        assert took < SOON, f"{took:.1f} s"


def refused(ctx: Ctx) -> None:
    """Mistakes in arguments are told at once, and cost nothing."""
    cpu, x = torch.ones(4), full(ctx, 1, 4)
    errors = (RuntimeError, ValueError, TypeError)
    with ctx.case("tensors of two devices in one call"), ctx.raises(errors):
        dist.all_gather([x.clone(), cpu.clone()], x)
    with ctx.case("CPU and device"), ctx.raises(errors):
        dist.all_gather_into_tensor(torch.ones(8), x)
    with ctx.case("sizes"), ctx.raises(errors):
        dist.all_gather_into_tensor(full(ctx, 0, 7), x)
    with ctx.case("dtypes"), ctx.raises(errors):
        dist.all_gather_into_tensor(full(ctx, 0, 8).int(), x)
    with ctx.case("a rank that is not there"), ctx.raises(errors):
        dist.broadcast(x, 5)
    with ctx.case("no meaning"), ctx.raises(errors):
        dist.all_reduce(x, op=dist.ReduceOp.BAND)
    dist.all_reduce(x)
    ctx.same(x, torch.full((4,), float(ctx.size)))


def refused_on_two_devices(ctx: Ctx) -> None:
    """Lists of tensors from two devices, whichever comes first."""
    count = torch.accelerator.device_count()
    if count < 2:
        return
    other = torch.device(ctx.device.type, (ctx.device.index + 1) % count)
    peer = 1 - ctx.rank
    for devices in ((ctx.device, other), (other, ctx.device)):
        a, b = (torch.ones(4, device=device) for device in devices)
        calls = {
            "all_gather": lambda a=a, b=b: dist.all_gather([a, b], a.clone()),
            "all_gather's input": lambda a=a, b=b: dist.all_gather([a, a.clone()], b),
            "all_gather_into_tensor": lambda a=a, b=b: dist.all_gather_into_tensor(a, b[:2]),
            "reduce_scatter": lambda a=a, b=b: dist.reduce_scatter(a.clone(), [a, b]),
            "reduce_scatter's output": lambda a=a, b=b: dist.reduce_scatter(b, [a, a.clone()]),
            "all_to_all": lambda a=a, b=b: dist.all_to_all([a.clone(), a.clone()], [a, b]),
            "all_to_all_single": lambda a=a, b=b: dist.all_to_all_single(a, b),
            "all_reduce_coalesced": lambda a=a, b=b: dist.all_reduce_coalesced([a, b]),
            "a batch": lambda a=a, b=b: dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, a, peer), dist.P2POp(dist.irecv, b, peer)]
            ),
        }
        if ctx.rank == 0:
            calls["gather"] = lambda a=a, b=b: dist.gather(a.clone(), [a, b])
            calls["scatter"] = lambda a=a, b=b: dist.scatter(a.clone(), [a, b])
        for name, call in calls.items():
            with ctx.case(name), ctx.raises((RuntimeError, ValueError), "device"):
                call()
    x = full(ctx, 1, 4)
    dist.all_reduce(x)
    ctx.same(x, torch.full((4,), float(ctx.size)))


def refused_by_nccl(ctx: Ctx) -> None:
    """What NCCL cannot do, it is said; the group stays usable."""
    x = full(ctx, 1, 4)
    for dtype, op in ((torch.int16, "SUM"), (torch.int32, "BAND")):
        with ctx.case(f"{dtype} {op}"), ctx.raises((RuntimeError, ValueError), "NCCL"):
            dist.all_reduce(x.to(dtype), op=getattr(dist.ReduceOp, op))
    with ctx.case("any source"), ctx.raises((RuntimeError, ValueError), "name the source"):
        dist.recv(x)
    dist.all_reduce(x)
    ctx.same(x, torch.full((4,), float(ctx.size)))


@pytest.mark.worlds(2)
def test_wrong_arguments(device_world):
    device_world.run(refused)


@pytest.mark.worlds(2)
def test_tensors_of_two_devices(device_world):
    device_world.run(refused_on_two_devices)


@pytest.mark.worlds(2, roads=["nccl"])
def test_what_nccl_cannot_do(device_world):
    device_world.run(refused_by_nccl)


def shrinks(ctx: Ctx, victim: int) -> tuple[str, float]:
    x = full(ctx, 1)
    dist.all_reduce(x)
    ctx.equal(float(x[0]), float(ctx.size))
    if ctx.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    seen = text_of_failure(ctx)
    left = [r for r in range(ctx.size) if r != victim]
    dist.shrink_group([victim], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    for where in (ctx.device, torch.device("cpu")):
        y = torch.full((1000,), float(ctx.rank), device=where)
        dist.all_reduce(y)
        ctx.equal(float(y[7]), float(sum(left)), f"on {where}")
    return seen


@pytest.mark.parametrize("road", ROADS)
def test_survivors_shrink_and_go_on(fresh_device_world, road):
    world = fresh_device_world(3, road)
    world.start(shrinks, 1)
    for rank, seen in enumerate(world.finish(allow_gone=True)):
        assert rank == 1 or "rank 1 (" in seen[0], seen


@pytest.mark.parametrize("road", ROADS)
def test_writes_to_tensors_in_flight(fresh_device_world, road):
    world = fresh_device_world(2, road, env=(("TORCH_DISTRIBUTED_DEBUG", "INFO"),))
    for warned in world.run(written_early_on_device):
        assert warned == [True, False, False, False], warned


def written_early_on_device(ctx: Ctx) -> list[bool]:
    with ctx.device:
        return test_work.written_early(ctx, "all_reduce")
