"""The CPU time of groups that are not used, and the staging memory of groups that are."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worlds.worker import Ctx

MIB_FIRST = 4  # a rank's share of staging memory, including a ring to a neighbour
MIB_FURTHER = 1
IDLE_SECONDS = 1
IDLE_WINDOWS = 3
IDLE_SHARE = 0.001  # of a core
SPIN = ("MYCOLL_SPIN_US", "100000")
NEAR = ("MYCOLL_DISTANCE", "near")  # where rings are larger

groups: list[dist.ProcessGroup] = []  # kept by each rank from one job to the next


pytestmark = pytest.mark.usefixtures("mycoll_only")


def collectives(ctx: Ctx, group: dist.ProcessGroup) -> None:
    """Each way to move data, with tensors larger than the staging memory."""
    x = torch.ones(2 << 20)
    parts = torch.empty(ctx.size, x.numel())
    for is_async in (False, True, False):
        for work in (
            dist.all_reduce(x, dist.ReduceOp.MAX, group=group, async_op=is_async),
            dist.broadcast(x, group_src=1, group=group, async_op=is_async),
            dist.reduce(x, group_dst=1, op=dist.ReduceOp.MAX, group=group, async_op=is_async),
            dist.all_gather_into_tensor(parts, x, group=group, async_op=is_async),
            dist.reduce_scatter_tensor(x, parts, dist.ReduceOp.MAX, group=group, async_op=is_async),
            dist.all_to_all_single(torch.empty_like(parts), parts, group=group, async_op=is_async),
            dist.barrier(group=group, async_op=is_async),
        ):
            if is_async:
                work.wait()
    ctx.equal(float(x.sum()), float(x.numel()))


def message_to_neighbour(ctx: Ctx, group: dist.ProcessGroup) -> None:
    x = torch.ones(2 << 20)
    sent = dist.isend(x, group_dst=(ctx.rank + 1) % ctx.size, group=group)
    dist.recv(torch.empty_like(x), group_src=(ctx.rank - 1) % ctx.size, group=group)
    sent.wait()


def make(ctx: Ctx, count: int) -> None:
    groups.extend(dist.new_group() for _ in range(count))


def use(ctx: Ctx, number: int) -> None:
    collectives(ctx, groups[number])


def exchange(ctx: Ctx) -> None:
    message_to_neighbour(ctx, groups[0])


def staging_mib(pids: list[int]) -> float:
    """A rank's share of the resident staging memory."""
    kib, is_staging = 0, False
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                is_staging = "/memfd:mycoll " in line
            elif is_staging and line.startswith("Pss:"):
                kib += int(line.split()[1])  # each page divided by the number of its mappings
    return kib / 1024 / len(pids)


@pytest.mark.parametrize("ranks", [2, 4])
def test_staging_memory(fresh, ranks):
    world = fresh(ranks, "shm", init=True, env=(NEAR,))
    world.run(make, 3)
    seen = [staging_mib(world.pids)]
    for number in (0, 1):
        world.run(use, number)
        seen.append(staging_mib(world.pids))
    world.run(exchange)
    seen.append(staging_mib(world.pids))
    unused, first, second, messages = seen
    assert unused < 0.1, seen  # init sends a few small messages
    assert first > 0, seen
    assert 0 < second - first <= MIB_FURTHER, seen
    assert second < messages, seen
    assert first + messages - second <= MIB_FIRST, seen


def idle(ctx: Ctx) -> float:
    make(ctx, 2)
    for group in groups:
        collectives(ctx, group)
        message_to_neighbour(ctx, group)
    dist.barrier()
    time.sleep(0.5)  # a thread may wait for further work for some time
    shares = []
    for _ in range(IDLE_WINDOWS):  # continuous work shows in each of them
        before = time.process_time()
        time.sleep(IDLE_SECONDS)
        shares.append((time.process_time() - before) / IDLE_SECONDS)
    return min(shares)


def test_an_idle_group_uses_no_cpu_time(fresh, transport):
    """This includes groups whose ranks spin while they wait."""
    shares = fresh(2, transport, init=True, env=(SPIN,)).run(idle)
    assert max(shares) < IDLE_SHARE, shares
