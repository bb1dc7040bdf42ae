"""Ranks that are stopped, do not make a call, or call in another order."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from worlds.pool import World
from worlds.worker import Ctx

from faults.deaths import VICTIM, loop
from faults.harness import Outcome, Seen, Stage, attempt, attempt_and_leave, fates

ROUNDS = 100
WARNINGS = (("MYCOLL_LOG", "warn"),)


def counted(ctx: Ctx) -> Seen:
    """Checks sums for about two seconds. Returns the number of wrong ones."""

    def action() -> int:
        wrong = 0
        for i in range(ROUNDS):
            x = torch.full((1 + 700 * (i % 50),), float(i + ctx.rank))
            dist.all_reduce(x)
            want = float(sum(i + r for r in range(ctx.size)))
            wrong += not bool((x == want).all())
            time.sleep(0.01)
        return wrong

    return attempt(action)


def stop_and_go(stage: Stage) -> Outcome:
    """SIGSTOP for 5 s, then SIGCONT."""
    judge = stage.judge()
    with stage.world(4) as world:
        world.start(counted)
        time.sleep(0.3)
        os.kill(world.pids[VICTIM], signal.SIGSTOP)
        time.sleep(5.0)
        os.kill(world.pids[VICTIM], signal.SIGCONT)
        found = fates(world)
        judge.fine(found)
        wrong = sum(s.value or 0 for s in found.values() if isinstance(s, Seen))
        judge.expect(wrong == 0, f"{wrong} wrong results")
    return judge.outcome()


def stop(stage: Stage) -> Outcome:
    """SIGSTOP for good, timeout 6 s."""
    judge = stage.judge()
    with stage.world(4, 6.0, env=WARNINGS) as world:
        world.start(loop)
        time.sleep(0.5)
        os.kill(world.pids[VICTIM], signal.SIGSTOP)
        stopped = time.monotonic()
        time.sleep(2.2)
        logs = [m.log_tail() for m in world.members if m.rank != VICTIM]
        judge.expect(any(f"rank {VICTIM}" in text for text in logs), "no log line after 2 s")
        _wait(world, 10.0)
        found = fates(world, (VICTIM,), 5.0)
        judge.raised(found, stopped, 8.0, rf"(rank {VICTIM}\b|missing.*\b{VICTIM}\b)", "stopped")
    return judge.outcome()


def _wait(world: World, seconds: float) -> None:
    """Waits for the other ranks, and then kills the stopped one, which never answers."""
    end = time.monotonic() + seconds
    for member in world.members:
        if member.rank == VICTIM:
            continue
        if member.conn.poll(max(0.0, end - time.monotonic())):
            member.outcome = world._receive(member)
    os.kill(world.pids[VICTIM], signal.SIGKILL)


def skip_one(ctx: Ctx, seconds: float) -> Seen:
    x = torch.ones(10)
    dist.all_reduce(x)
    if ctx.rank == VICTIM:
        return attempt(lambda: time.sleep(seconds))
    return attempt_and_leave(lambda: dist.all_reduce(x))


def absent(stage: Stage) -> Outcome:
    """One rank leaves a call out and sleeps, timeout 4 s."""
    judge = stage.judge()
    with stage.world(4, 4.0, env=WARNINGS) as world:
        world.start(skip_one, 7.0)
        found = fates(world)
        judge.fine({VICTIM: found.pop(VICTIM)})
        judge.raised(found, None, 5.0, rf"(rank {VICTIM}\b|missing.*\b{VICTIM}\b)", "all_reduce",
                     "arrived")  # fmt: skip
        logs = "".join(m.log_tail() for m in world.members if m.rank != VICTIM and not world.broken)
        judge.notes.append("a log line before" if f"rank {VICTIM}" in logs else "no log line")
    return judge.outcome()


def crossed(ctx: Ctx) -> Seen:
    ranks = list(range(ctx.size))
    groups = [dist.new_group(ranks, timeout=ctx.timeout) for _ in range(2)]
    x = torch.ones(10)
    for group in groups:
        dist.all_reduce(x, group=group)

    def action() -> None:
        order = groups if ctx.rank == 0 else groups[::-1]
        for group in order:
            dist.all_reduce(x, group=group)

    return attempt_and_leave(action)


def crossed_groups(stage: Stage) -> Outcome:
    """Two groups used in crossed order, timeout 6 s."""
    judge = stage.judge()
    with stage.world(2, 6.0) as world:
        world.start(crossed)
        judge.raised(fates(world), None, 3.0, "deadlock|order")
    return judge.outcome()
