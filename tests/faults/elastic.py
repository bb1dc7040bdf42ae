"""Ranks of a group that changes are killed."""

from __future__ import annotations

import random
import time
from datetime import timedelta

import mycoll
import torch
import torch.distributed as dist
from worlds.worker import Ctx

from faults.deaths import kill
from faults.harness import NO_HANG, Outcome, Seen, Skip, Stage, attempt, fates

VICTIMS = (0, 2)
FORMED = "the group is formed"


def continue_without(ctx: Ctx) -> Seen:
    """Sums, and recovers, until only the survivors are in the group. Returns the number of wrong
    sums."""
    members = mycoll.ElasticGroup(
        ctx.store("elastic"), min_ranks=2, ranks=ctx.size, timeout=timedelta(seconds=20)
    )
    print(FORMED, flush=True)

    def is_wrong() -> bool:
        x = torch.ones(1000)
        dist.all_reduce(x, group=members.group)
        return not bool((x == members.size).all())

    def action() -> int:
        wrong = 0
        while members.size > ctx.size - len(VICTIMS):
            try:
                while True:
                    wrong += is_wrong()
                    time.sleep(0.002)
            except dist.DistBackendError:
                members.recover()
        return wrong + is_wrong()

    return attempt(action)


def while_recovering(stage: Stage, times: int = 4) -> Outcome:
    """SIGKILL of rank 0 of a mycoll.ElasticGroup, and of another rank while the others recover."""
    if stage.family != "mycoll":
        raise Skip("it has no mycoll.ElasticGroup")
    judge = stage.judge()
    chance = random.Random(stage.seed)
    for _ in range(times):
        with stage.world(5, init=False) as world:
            world.start(continue_without)
            deadline = time.monotonic() + NO_HANG
            while not all(FORMED in member.log_tail() for member in world.members):
                judge.expect(time.monotonic() < deadline, "the group was not formed")
                if judge.unmet:
                    return judge.outcome()
                time.sleep(0.01)
            time.sleep(0.2)
            killed = kill(world.pids[VICTIMS[0]])
            time.sleep(chance.uniform(0, 0.05))
            kill(world.pids[VICTIMS[1]])
            found = fates(world, VICTIMS)
            judge.fine(found)
            for rank, seen in found.items():
                if isinstance(seen, Seen) and not seen.kind:
                    judge.took(f"rank {rank}", seen.ended - killed, 1.0)
                    judge.expect(seen.value == 0, "wrong sums")
    return judge.outcome()
