"""Ranks that are killed."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from worlds.worker import Ctx

from faults.harness import (
    Outcome,
    Seen,
    Skip,
    Stage,
    attempt,
    attempt_and_leave,
    fates,
    sleep_until,
)

VICTIM = 2
GIB = 1 << 30
INIT_POINTS = 6
INIT_SECONDS = 0.15  # roughly the init of four ranks on two cores
BEGUN = "init has begun"


def all_reduce_forever(pause: float = 0.002) -> None:
    x = torch.ones(1000)
    while True:
        dist.all_reduce(x.fill_(1.0))
        time.sleep(pause)


def loop(ctx: Ctx, resident: int = 0) -> Seen:
    held = None
    if resident and ctx.rank == VICTIM:
        held = torch.ones(resident, dtype=torch.uint8)
    seen = attempt(all_reduce_forever)  # keeps the group: destroying it would notify the others
    del held
    return seen


def kill(pid: int) -> float:
    now = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return now


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def in_loop(stage: Stage, size: int = 5) -> Outcome:
    """SIGKILL in an all_reduce loop."""
    judge = stage.judge()
    with stage.world(size) as world:
        world.start(loop)
        time.sleep(0.5)
        killed = kill(world.pids[VICTIM])
        judge.raised(fates(world, (VICTIM,)), killed, 1.0, rf"rank {VICTIM}\b", "all_reduce")
    return judge.outcome()


def with_memory(stage: Stage) -> Outcome:
    """SIGKILL of a rank with 8 GiB of memory, in an all_reduce loop."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    resident = 8 * GIB
    if available < resident + 4 * GIB:
        raise Skip(f"{available / GIB:.0f} GiB are free, 12 are needed")
    judge = stage.judge()
    with stage.world(4) as world:
        world.start(loop, resident)
        pid, end = world.pids[VICTIM], time.monotonic() + 15
        while resident_bytes(pid) < resident and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(0.5)
        judge.notes.append(f"{resident_bytes(pid) / GIB:.1f} GiB resident")
        killed = kill(pid)
        judge.raised(fates(world, (VICTIM,)), killed, 1.0, rf"rank {VICTIM}\b", "all_reduce")
    return judge.outcome()


def call_later(ctx: Ctx, seconds: float) -> Seen:
    x = torch.ones(1000)
    dist.all_reduce(x)
    time.sleep(seconds)
    return attempt_and_leave(lambda: dist.all_reduce(x))


def while_idle(stage: Stage) -> Outcome:
    """SIGKILL while no rank is in a call; the next call raises."""
    judge = stage.judge()
    with stage.world(4) as world:
        world.start(call_later, 1.5)
        time.sleep(0.7)
        kill(world.pids[VICTIM])
        judge.raised(fates(world, (VICTIM,)), None, 0.1, rf"rank {VICTIM}\b")
    return judge.outcome()


def init(ctx: Ctx, name: str) -> Seen:
    def action() -> None:
        print(BEGUN, flush=True)
        ctx.init(name)
        all_reduce_forever()

    return attempt_and_leave(action)


def in_init(stage: Stage, points: int = INIT_POINTS) -> Outcome:
    """SIGKILL at random points of init_process_group and the first collective."""
    judge = stage.judge()
    chance = random.Random(stage.seed)
    timeout = 7.0  # if the rank dies before it registers, the others cannot detect that
    late = unknown = 0
    for point in range(points):
        with stage.world(4, timeout, init=False) as world:
            world.start(init, f"init{point}")
            while BEGUN not in world.members[VICTIM].log_tail():
                time.sleep(0.002)
            time.sleep(chance.uniform(0, INIT_SECONDS))
            killed = kill(world.pids[VICTIM])
            found = fates(world, (VICTIM,))
            ends = [s.ended - killed for s in found.values() if isinstance(s, Seen)]
            is_late = max(ends, default=99.0) > 5.0
            # Then the text must at least name the missing rank.
            names_it = re.compile(rf"missing: [\d, ]*\b{VICTIM}\b")
            is_unknown = is_late and all(
                isinstance(s, Seen) and names_it.search(s.text) for s in found.values()
            )
            unknown += is_unknown
            late += is_late and not is_unknown
            for rank, seen in found.items():
                judge.expect(isinstance(seen, Seen) and seen.kind != "", f"rank {rank}: {seen}")
                if isinstance(seen, Seen) and seen.ended - killed <= 5.0:
                    judge.slowest = max(judge.slowest or 0.0, seen.ended - killed)
                elif isinstance(seen, Seen):
                    judge.sample = f"{seen.kind}: {seen.text}"
    if unknown:
        judge.notes.append(
            f"{unknown} of {points} points: before it had identified itself: at the timeout"
        )
    judge.expect(late == 0, f"{late} of {points} points: only at the timeout of {timeout:.0f} s")
    return judge.outcome()


def receive(ctx: Ctx, seconds: float) -> Seen:
    x = torch.ones(1000)
    dist.all_reduce(x)
    if ctx.rank == 0:
        return attempt_and_leave(lambda: dist.recv(x, 1))
    return attempt(lambda: sleep_until(time.monotonic() + seconds))


def during_recv(stage: Stage) -> Outcome:
    """SIGKILL of a third rank while one waits in recv for another."""
    judge = stage.judge()
    with stage.world(4) as world:
        world.start(receive, 21.0)
        time.sleep(0.7)
        killed = kill(world.pids[VICTIM])
        member = world.members[0]
        if member.conn.poll(21):
            member.outcome = world._receive(member)
        kind, value = member.outcome or ("", None)
        judge.expect(kind == "ok", "rank 0 did not answer")
        if kind == "ok":
            judge.raised({0: value}, killed, 1.0, rf"rank {VICTIM}\b", "recv")
    return judge.outcome()
