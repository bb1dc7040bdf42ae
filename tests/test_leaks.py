"""Threads, descriptors and memory of groups."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import time
from pathlib import Path

import mycoll
import pytest
import torch
import torch.distributed as dist
from worlds import warm
from worlds.worker import Ctx

GROUPS = 200
FEW = 5
MYCOLL_THREADS = 2  # a progress thread and a monitor, for the whole process
EXTRA_FDS = 64  # the allowed increase with the number of groups


def threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def fds() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def use(ctx: Ctx, group: dist.ProcessGroup | None = None) -> None:
    x = torch.ones(1000)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group, async_op=True).wait()
    ctx.equal(float(x[0]), float(ctx.size**2))
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    work = dist.isend(x, right, group=group)
    dist.recv(torch.empty(1000), left, group=group)
    work.wait()


def use_window(ctx: Ctx) -> mycoll.Window:
    """Makes a window of a shared tensor, uses it, and returns it open."""
    memory = mycoll.zeros(300_000)
    dist.all_reduce(memory)
    window = mycoll.new_window(memory)
    window.put(torch.ones(1000), (ctx.rank + 1) % ctx.size, 0, False)
    window.signal((ctx.rank + 1) % ctx.size, False)
    window.wait_signal((ctx.rank - 1) % ctx.size, False)
    ctx.equal(float(memory.sum()), 1000.0)
    return window


def many_groups(ctx: Ctx) -> dict[str, int]:
    before = threads()
    ctx.init()
    use(ctx)
    groups = []
    for i in range(GROUPS):
        groups.append(dist.new_group())
        use(ctx, groups[-1])
        if i == FEW:
            few = fds()
    for group in groups[::7]:
        use(ctx, group)
    result = {"threads": threads() - before, "fds": fds() - few}
    for group in groups:
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    return result


def test_200_groups(fresh, transport):
    for cost in fresh(4, transport, init=False).run(many_groups, deadline=150):
        assert cost["threads"] <= MYCOLL_THREADS, cost
        assert cost["fds"] <= EXTRA_FDS, cost


BESIDE_A_GLOO_WORLD = """
import gc, weakref
import torch
import torch.distributed as dist

def make_and_destroy():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(3), group=dist.new_group(backend="mycoll"))
    world = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    return world

assert make_and_destroy()() is None, "the world is kept after its destruction"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import torch.distributed.nn
torch.distributed.nn.all_reduce(torch.ones(3))
"""


def test_a_world_of_another_backend_is_freed():
    """gloo's threads end with the world. Otherwise one might drop a tensor while Python exits, for
    which torch aborts the process."""
    program = warm.start(BESIDE_A_GLOO_WORLD, to_the_end=True)
    _, error = program.communicate(100)
    assert program.returncode == 0, error


def half_begun_groups(ctx: Ctx) -> int:
    """Rank 0 starts a group's first collective, and rank 1 leaves the group without calling it."""
    dist.all_reduce(torch.ones(3))
    for _ in range(10):
        group = dist.new_group()
        if ctx.rank == 0:
            dist.all_reduce(torch.ones(3), group=group, async_op=True)
            time.sleep(0.05)
        dist.barrier()
        if ctx.rank == 0:
            group._get_backend(torch.device("cpu")).abort()
        dist.destroy_process_group(group)
        dist.barrier()
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found += "memfd" in str(entry.readlink())
    return found


def test_unfetched_memory_is_released(fresh):
    assert max(fresh(2, "shm").run(half_begun_groups)) <= 4


def repeatedly(ctx: Ctx) -> dict[str, list[float]]:
    seen: dict[str, list[float]] = {"threads": [], "fds": [], "MiB": []}
    for i in range(50):
        ctx.init(f"again{i}")
        use(ctx)
        group = dist.new_group()
        use(ctx, group)
        dist.all_reduce(torch.ones(300_000))
        if not ctx.gloo:
            use_window(ctx).tensor_deregister()
        dist.destroy_process_group()
        del group
        if i in (9, 49):
            gc.collect()
            end = time.monotonic() + 5  # threads may take some time to end
            while seen["threads"] and threads() > seen["threads"][0] and time.monotonic() < end:
                time.sleep(0.05)
            seen["threads"].append(threads())
            seen["fds"].append(fds())
            seen["MiB"].append(resident_mib())
    return seen


def test_50_times_in_one_process(fresh, transport):
    for seen in fresh(3, transport, init=False).run(repeatedly, deadline=150):
        assert seen["threads"][1] <= seen["threads"][0], seen
        assert seen["fds"][1] <= seen["fds"][0] + 2, seen
        assert seen["MiB"][1] <= seen["MiB"][0] + 25, seen


def many_operations(ctx: Ctx) -> float:
    def some(count: int) -> None:
        for i in range(count):
            x = torch.ones(5000)
            dist.all_reduce(x, async_op=i % 2 == 0)
            dist.all_gather_into_tensor(torch.empty(100 * ctx.size), x[:100])
            dist.barrier()

    some(200)
    before = resident_mib()
    some(1500)
    return resident_mib() - before


@pytest.mark.worlds(2, tcp=(2,))
def test_operations_leave_no_memory_behind(world):
    for grown in world.run(many_operations):
        assert grown < 20, f"{grown:.0f} MiB"


def busy(ctx: Ctx, trace: str) -> None:
    os.environ["MYCOLL_TRACE_FILE"] = trace
    ctx.init()
    groups = [dist.new_group() for _ in range(3)]
    for group in groups:
        use(ctx, group)
    window = use_window(ctx)
    others = [rank for rank in range(ctx.size) if ctx.setup.transport == "shm" or rank == ctx.rank]
    mapped = [window.map_remote_tensor(rank) for rank in others]
    print("in use", flush=True)
    while True:
        for group in groups:
            dist.all_reduce(torch.ones(300_000), group=group)
            dist.all_reduce(mycoll.zeros(300_000), group=group)
        mapped[-1].add_(1)


def memories(pid: int | str) -> set[str]:
    """The inodes of mycoll's memfds that the process has mapped or open."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text()
        found.update(re.findall(r" (\d+) +/memfd:mycoll", maps))
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "/memfd:mycoll" in str(fd.readlink()):
                    found.add(str(fd.stat().st_ino))
    return found


def test_killed_ranks_leave_nothing_behind(fresh, transport, tmp_path, backend):
    """kill -9 of all ranks leaves no process, memory, socket or file."""
    if backend != "mycoll":
        pytest.skip("specific to mycoll")
    files = set(map(str, Path("/dev/shm").iterdir()))
    world = fresh(3, transport, init=False)
    world.start(busy, str(tmp_path / "trace-%r"))
    end = time.monotonic() + 40
    while not all("in use" in m.log.read_text() for m in world.members):
        assert time.monotonic() < end, [m.log.read_text() for m in world.members]
        time.sleep(0.1)
    sockets = set()
    for pid in world.pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.update(re.findall(r"socket:\[(\d+)\]", str(fd.readlink())))
    unix = [
        words[7]
        for words in map(str.split, Path("/proc/net/unix").read_text().splitlines()[1:])
        if len(words) > 7 and words[6] in sockets and "mycoll" in words[7]
    ]
    held = set().union(*(memories(pid) for pid in world.pids))
    assert unix and held  # else the test would check nothing
    # Stop them first, because a rank that detects the death of another writes a trace.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in world.pids:
            os.kill(pid, number)
    # The kernel may free the resources of a process after its end is visible.
    end = time.monotonic() + 20
    while left := _left(held, set(unix)) | (set(map(str, Path("/dev/shm").iterdir())) - files):
        assert time.monotonic() < end, left
        time.sleep(0.1)
    assert not list(tmp_path.iterdir())


def _left(held: set[str], unix: set[str]) -> set[str]:
    named = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    pids = [process.name for process in Path("/proc").iterdir() if process.name.isdigit()]
    return (named & unix) | (held & set().union(*(memories(pid) for pid in pids)))
