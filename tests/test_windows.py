"""One-sided windows: mycoll.Window with any torch, and torch's own API (since 2.14)."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import mycoll
import pytest
import torch
import torch.distributed as dist
from faults.harness import Seen, answers, attempt, kill_one
from mycoll._native import native
from worlds.worker import Ctx

MIB = 1 << 20
HAS_TORCHS_OWN = hasattr(dist.distributed_c10d, "_new_window")


def shared(*shape: int, **options: Any) -> torch.Tensor:
    return mycoll.zeros(*shape, **options)


def ordinary(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(*shape, **options)


KINDS = {"shared": shared, "ordinary": ordinary}


def is_mapped_here(ctx: Ctx, kind: str) -> bool:
    return kind == "shared" and ctx.setup.transport == "shm"


def resident() -> int:
    """The resident memory of this process in bytes, including mappings."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- puts, signals and mappings


def all_ranks_put(ctx: Ctx, kind: str) -> None:
    for dtype, numel in ((torch.float32, 1), (torch.bfloat16, 5001), (torch.int64, 400_003)):
        with ctx.case(f"{dtype} {numel}"):
            memory = KINDS[kind](ctx.size, numel, dtype=dtype)
            window = mycoll.new_window(memory)
            mine = [torch.full((numel,), 10 * ctx.rank + to, dtype=dtype) for to in range(ctx.size)]
            works = [
                window.put(mine[to], to, ctx.rank * numel, asynchronous)
                for to in range(ctx.size)
                for asynchronous in (False, True)
            ]
            for to in range(ctx.size):
                window.signal(to, False)
            for source in range(ctx.size):
                window.wait_signal(source, True).wait()
                want = torch.full((numel,), 10 * source + ctx.rank, dtype=dtype)
                ctx.same(memory[source], want)
            for work in works:
                work.wait()
                assert work.is_completed() and work.is_success()
            window.tensor_deregister()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.worlds(2, 3, tcp=(2, 3))
def test_every_rank_puts_to_every_rank(world, mycoll_only, kind):
    world.run(all_ranks_put, kind)


def odd_sources(ctx: Ctx) -> None:
    memory = shared(6, 4)
    window = mycoll.new_window(memory)
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    whole = torch.arange(24.0).view(4, 6) + ctx.rank
    window.put(whole.t(), right, 0, False)
    window.signal(right, False)
    window.wait_signal(left, False)
    ctx.same(memory, (torch.arange(24.0).view(4, 6) + left).t())
    window.signal(left, False)  # the memory may be written again
    window.wait_signal(right, False)
    window.put(torch.tensor(5.0).expand(3), right, 21, False)
    window.put(torch.empty(0), right, 24, False)
    window.signal(right, False)
    window.wait_signal(left, False)
    want = (torch.arange(24.0).view(4, 6) + left).t().reshape(-1)
    want[21:] = 5
    ctx.same(memory.view(-1), want)
    window.tensor_deregister()


@pytest.mark.worlds(3, tcp=(2,))
def test_sources_that_are_not_contiguous(world, mycoll_only):
    world.run(odd_sources)


def reads_in_place(ctx: Ctx, numel: int) -> dict[str, int]:
    memory = mycoll.empty(numel)
    if ctx.rank == 0:
        memory.fill_(3)
    window = mycoll.new_window(memory.view(4, -1))
    dist.barrier()
    theirs = window.map_remote_tensor(0)
    ctx.equal(tuple(theirs.shape), (4, numel // 4))
    before = native()._shared_memory_usage()[0], resident()
    if ctx.rank == 1:
        ctx.equal(float(theirs[2, -1]), 3.0)
        theirs[1, 7] = 9.0
    after = native()._shared_memory_usage()[0], resident()
    dist.barrier()
    if ctx.rank == 0:
        ctx.equal(float(memory.view(4, -1)[1, 7]), 9.0)
        assert theirs.data_ptr() == memory.data_ptr()
    ctx.equal(window.get_attr(0).access_type.name, "UNIFIED")
    window.tensor_deregister()
    ctx.equal(float(theirs[2, 0]), 3.0)  # valid while the owner keeps the tensor
    dist.barrier()
    return {"heap": after[0] - before[0], "resident": after[1] - before[1]}


@pytest.mark.worlds(2)
def test_a_gigabyte_is_read_without_a_copy(world, mycoll_only):
    for cost in world.run(reads_in_place, (1 << 30) // 4):
        assert cost["heap"] == 0 and cost["resident"] < 16 * MIB, cost


def puts_to_a_sleeping_rank(ctx: Ctx, kind: str) -> None:
    """The target waits in Python without the GIL, and makes no call of mycoll."""
    numel = 40 * MIB // 4
    memory = KINDS[kind](numel)
    window = mycoll.new_window(memory)
    here = ctx.store("put")
    if ctx.rank == 0:
        window.put(torch.full((numel,), 2.0), 1, 0, False)
        window.signal(1, False)
        here.set("done", "")
    else:
        here.wait(["done"])
        window.wait_signal(0, False)
        ctx.equal(memory.unique().tolist(), [2.0])
    window.tensor_deregister()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.worlds(2, tcp=(2,))
def test_a_put_needs_no_call_of_the_target(world, mycoll_only, kind):
    world.run(puts_to_a_sleeping_rank, kind)


def on_subgroups(ctx: Ctx) -> None:
    """A window of a subgroup uses the ranks of the subgroup."""
    pair = [0, 2]
    group = dist.new_group(pair)
    if ctx.rank in pair:
        memory = shared(4)
        window = mycoll.new_window(None, group)
        window.tensor_register(memory, owning=False)
        me = pair.index(ctx.rank)
        window.put(torch.full((2,), float(ctx.rank)), 1 - me, 1, False)
        window.signal(1 - me, False)
        window.wait_signal(1 - me, False)
        ctx.equal(memory.tolist(), [0.0, float(pair[1 - me]), float(pair[1 - me]), 0.0])
        window.tensor_deregister()
        window.tensor_register(memory[:2])
        window.put(torch.ones(2), 1 - me, 0, False)
        window.tensor_deregister()
        dist.destroy_process_group(group)


@pytest.mark.worlds(3, tcp=(3,))
def test_on_a_part_of_the_world(world, mycoll_only):
    world.run(on_subgroups)


def by_torchs_api(ctx: Ctx) -> None:
    assert dist.distributed_c10d._supports_window()
    memory = shared(10)
    window = dist.distributed_c10d._new_window(memory)
    assert isinstance(window, mycoll.Window)
    other = 1 - ctx.rank
    window.put(torch.full((3,), 1.0 + ctx.rank), other, 2, True).wait()
    options = mycoll.SignalOptions()
    options.timeout = timedelta(seconds=30)
    window.signal(other, True, options).wait()
    window.wait_signal(other, False)
    ctx.equal(memory[2:5].tolist(), [1.0 + other] * 3)
    ctx.equal(window.map_remote_tensor(other).shape, memory.shape)
    window.tensor_deregister()


@pytest.mark.skipif(not HAS_TORCHS_OWN, reason="torch has windows since 2.14")
@pytest.mark.worlds(2)
def test_by_torchs_own_api(world, mycoll_only):
    world.run(by_torchs_api)


# --- errors


def refusals(ctx: Ctx) -> None:
    memory = shared(10, 10)
    window = mycoll.new_window()
    for call in (
        lambda: window.put(memory, 0, 0, False),
        lambda: window.signal(0, False),
        lambda: window.wait_signal(0, False),
        lambda: window.map_remote_tensor(0),
        lambda: window.tensor_deregister(),
    ):
        with pytest.raises(ValueError, match="has no tensor"):
            call()
    with pytest.raises(ValueError, match="must be contiguous"):
        window.tensor_register(memory.t())
    with pytest.raises(ValueError, match="dense"):
        window.tensor_register(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="16 dimensions"):
        window.tensor_register(torch.zeros([1] * 17))
    window.tensor_register(memory)
    with pytest.raises(ValueError, match="deregister that on all ranks first"):
        window.tensor_register(memory)
    other = 1 - ctx.rank
    for numel, offset in ((101, 0), (1, 100), (2, 99), (1, -1), (0, 101), (1, 2**62)):
        with pytest.raises(ValueError, match=f"window of rank {other}, which has 100"):
            window.put(torch.zeros(numel), other, offset, False)
    with pytest.raises(ValueError, match="dtype on rank"):
        window.put(torch.zeros(3, dtype=torch.int32), other, 0, False)
    for rank in (-1, 2, 2**40):
        with pytest.raises(ValueError, match="must be a rank"):
            window.put(torch.zeros(3), rank, 0, False)
        with pytest.raises(ValueError, match="must be a rank"):
            window.signal(rank, False)
        with pytest.raises(ValueError, match="must be a rank"):
            window.map_remote_tensor(rank)
    with pytest.raises(RuntimeError, match="resiz"):
        memory.resize_(1000)
    window.tensor_deregister()
    memory.resize_(1000)
    ctx.equal(memory[:100].count_nonzero().item(), 0)
    window.tensor_register(torch.zeros(5))
    with pytest.raises(NotImplementedError, match=rf"rank {other} \(.*cannot be mapped"):
        window.map_remote_tensor(other)
    ctx.equal(window.get_attr(other).access_type.name, "SEPARATE")
    window.tensor_deregister()


@pytest.mark.worlds(2, tcp=(2,))
def test_wrong_arguments(world, mycoll_only):
    world.run(refusals)


def times_out(ctx: Ctx) -> Seen:
    window = mycoll.new_window(shared(10))
    if ctx.rank == 0:
        options = mycoll.WaitSignalOptions()
        options.timeout = timedelta(seconds=0.5)
        seen = attempt(lambda: window.wait_signal(1, False, options))
        ctx.store("times out").set("done", "")
        return seen
    ctx.store("times out").wait(["done"], timedelta(seconds=30))

    def repeat() -> None:
        while True:  # the error arrives soon
            window.put(torch.zeros(1), 0, 0, False)

    return attempt(repeat)


def test_a_timeout_names_the_missing_rank(reused, mycoll_only, transport):
    late, other = reused(2, transport).run_in_group(times_out)
    assert "wait_signal from rank 1 (" in late.text and "timed out after" in late.text, late
    assert "wait_signal from rank 1 (" in other.text and "put was called after" in other.text, other


# --- deaths


def dies_with_a_window(ctx: Ctx, kind: str, victim: int, what: str) -> Seen:
    memory = KINDS[kind](ctx.size, MIB)
    window = mycoll.new_window(memory)
    theirs = window.map_remote_tensor(victim) if is_mapped_here(ctx, kind) else None
    # Each rank writes its own row, because others may detect the death later and put until then.
    data = torch.ones(MIB)
    here = ctx.store("puts")
    if ctx.rank == victim and what == "during puts":
        kill_one(ctx, victim, here=here)
    elif what == "before":
        kill_one(ctx, victim)

    def repeat() -> None:
        here.set(str(ctx.rank), "")
        if what == "waited for":
            if ctx.rank == victim:
                threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
                time.sleep(60)
            window.wait_signal(victim, False)
        while True:
            window.put(data, victim, ctx.rank * MIB, False)

    seen = attempt(repeat)
    # A mapping remains valid; the window itself releases the dead rank's memory.
    if theirs is not None:
        theirs[ctx.rank].fill_(4)
        ctx.equal(theirs[ctx.rank].unique().tolist(), [4.0])
        del theirs
    memory.fill_(5)
    again = attempt(lambda: window.map_remote_tensor(victim))
    assert f"rank {victim} (" in again.text, again
    until = time.monotonic() + 10
    while mapped_pages() > 1 and time.monotonic() < until:
        time.sleep(0.1)
    if kind == "shared":
        assert mapped_pages() <= 1, Path("/proc/self/maps").read_text()
    ctx.equal(memory.unique().tolist(), [5.0])
    return seen


def mapped_pages() -> int:
    """The number of mappings of shared memory of at least 12 MiB, which are not arenas or rings."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        found += "memfd:mycoll" in line and end - begin >= 12 * MIB
    return found


@pytest.mark.parametrize("what", ["before", "during puts", "waited for"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_death_is_named(stage, mycoll_only, kind, what):
    with stage.world(3) as world:
        world.start(dies_with_a_window, kind, 1, what)
        for seen in answers(world, (1,)).values():
            assert isinstance(seen, Seen) and seen.kind == "DistBackendError", seen
            assert "rank 1 (" in seen.text and "has ended (killed" in seen.text, seen.text


# --- memory and lifetimes


def bytes_in_use() -> int:
    gc.collect()
    return native()._shared_memory_usage()[1]


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def make_and_drop(ctx: Ctx, kind: str) -> dict[str, int]:
    """Makes windows of many sizes, which are deregistered or dropped, some with mappings."""
    random = ctx.random("windows")
    other = (ctx.rank + 1) % ctx.size
    cost: dict[str, int] = {}
    for step in range(120):
        numel = random.choice([10, 5_000, 300_000, 9_000_000])
        memory = KINDS[kind](numel)
        window = mycoll.new_window(memory)
        window.put(torch.full((min(numel, 100_000),), 1.0 + step), other, 0, False)
        window.signal(other, False)
        window.wait_signal((ctx.rank - 1) % ctx.size, False)
        ctx.equal(float(memory[0]), 1.0 + step)
        kept = None
        if is_mapped_here(ctx, kind) and random.random() < 0.3:
            kept = window.map_remote_tensor(other)
        if random.random() < 0.7:
            window.tensor_deregister()
        del memory, window, kept
        if step == 20:
            dist.barrier()
            cost["fds"], cost["resident"] = -descriptors(), -resident()
    dist.barrier()
    ctx.equal(bytes_in_use(), 0)
    cost["fds"] += descriptors()
    cost["resident"] += resident()
    cost["regions"] = native()._shared_memory_usage()[0]
    return cost


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.worlds(3, tcp=(2,))
def test_memory_is_returned(world, mycoll_only, kind):
    for cost in world.run(make_and_drop, kind):
        assert cost["fds"] <= 8, cost
        assert cost["regions"] <= 256 * MIB, cost
        assert cost["resident"] <= 300 * MIB, cost


def freed_in_any_order(ctx: Ctx) -> None:
    """Frees tensors before windows, and windows before and after their group. Puts to a window that
    was dropped must not write to other tensors."""
    ctx.init("first")
    other = 1 - ctx.rank
    windows, views = [], []
    for index in range(4):
        memory = shared(2_000_000)
        window = mycoll.new_window(memory)
        if ctx.setup.transport == "shm":
            views.append(window.map_remote_tensor(other))
        if index != 1 + ctx.rank:  # each rank drops another one
            windows.append(window)
        del memory, window
    dist.barrier()
    for window in windows:
        window.put(torch.full((2_000_000,), 7.0), other, 0, False)
    fresh = [shared(2_000_000) for _ in range(4)]  # may reuse the memory of the dropped one
    for view in views:
        view.fill_(8)
    dist.barrier()
    for tensor in fresh:
        ctx.equal(tensor.count_nonzero().item(), 0)
    last = windows.pop()
    dist.destroy_process_group()
    seen = attempt(partial(last.put, torch.zeros(1), other, 0, False))
    assert "destroyed" in seen.text, seen
    del last
    windows.clear()
    for view in views:
        view.fill_(9)  # the owner may have freed the tensor
    ctx.init("second")
    for tensor in fresh:
        ctx.equal(tensor.count_nonzero().item(), 0)
    window = mycoll.new_window(shared(3))
    dist.destroy_process_group()
    del window, fresh, tensor
    ctx.equal(bytes_in_use(), 0)


def test_windows_are_freed_in_any_order(fresh, mycoll_only, transport):
    fresh(2, transport, init=False).run(freed_in_any_order)


def leaves_with_a_window(ctx: Ctx) -> Seen:
    window = mycoll.new_window(shared(1000))
    if ctx.rank == 1:
        dist.destroy_process_group()
        ctx.store("left").set("it", "")
        return attempt(lambda: None)
    ctx.store("left").wait(["it"])
    return attempt(lambda: window.wait_signal(1, False))


def test_a_rank_that_has_left_is_named(reused, mycoll_only, transport):
    seen = reused(2, transport).run_in_group(leaves_with_a_window)[0]
    assert "rank 1 (" in seen.text and "has left the group" in seen.text, seen
