"""Ranks with different calls, different messages or different world sizes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from jobs.mismatches import MISMATCHES, Mismatch, f32
from worlds.worker import Ctx

from faults.harness import Judge, Outcome, Seen, Stage, attempt_and_leave, fates

TIMEOUT = 3.0

MORE: dict[str, Mismatch] = {
    "splits": Mismatch(
        lambda n: dist.all_to_all_single(f32(n), f32(n)),
        lambda n: dist.all_to_all_single(f32(3 * n), f32(3 * n)),
        ("all_to_all",),
    ),
    "root of a scatter": Mismatch(
        lambda n: dist.scatter(f32(4), [f32(4)] * n, src=0),
        lambda n: dist.scatter(f32(4), [f32(4)] * n if dist.get_rank() == 1 else None, src=1),
        ("root",),
    ),
    "size of a broadcast": Mismatch(
        lambda n: dist.broadcast(f32(10), 0), lambda n: dist.broadcast(f32(20), 0), ("10", "20")
    ),
    "reduce op of a reduce_scatter": Mismatch(
        lambda n: dist.reduce_scatter_tensor(f32(4), f32(4 * n)),
        lambda n: dist.reduce_scatter_tensor(f32(4), f32(4 * n), op=dist.ReduceOp.MAX),
        ("SUM", "MAX"),
    ),
}
ALL = {**MISMATCHES, **MORE}


def disagree(ctx: Ctx, name: str) -> Seen:
    dist.all_reduce(torch.ones(4))
    mismatch = ALL[name]
    call = mismatch.one if ctx.rank == 0 else mismatch.others

    def action() -> None:
        call(ctx.size)
        dist.barrier()  # a broadcast may complete here before the root detects the mismatch

    return attempt_and_leave(action)


def calls(stage: Stage) -> Outcome:
    """Calls that differ in op, dtype, reduce op, root or size."""
    total = stage.judge()
    kept, silent, died, slow, vague = 0, 0, 0, 0, 0
    for name, mismatch in ALL.items():
        judge = stage.judge()
        with stage.world(2, TIMEOUT) as world:
            world.start(disagree, name)
            found = fates(world, limit=10)
        judge.raised(found, None, 1.0)
        seen = [s for s in found.values() if isinstance(s, Seen)]
        died += len(seen) < len(found)
        silent += any(not s.kind for s in seen)
        slow += any(s.kind and s.seconds > stage.patience for s in seen)
        words = [all(w.lower() in s.text.lower() for w in mismatch.texts) for s in seen if s.kind]
        vague += not all(words)
        kept += not judge.unmet and all(words)
        total.slowest = max(total.slowest or 0.0, judge.slowest or 0.0)
        total.sample = total.sample or judge.sample
        if judge.unmet:
            total.notes.append(f"{name}: {judge.unmet[0]}")
    if stage.family == "gloo":
        total.notes.clear()
    total.expect(kept == len(ALL), f"{kept} of {len(ALL)} cases raised on both ranks in time with "
                 f"both calls; {silent} passed silently on a rank, {died} killed a process, "
                 f"{slow} came late, {vague} did not show both calls")  # fmt: skip
    return total.outcome()


def exchange(ctx: Ctx, sent: int, expected: int) -> Seen:
    dist.all_reduce(torch.ones(4))

    def action() -> None:
        if ctx.rank == 0:
            dist.send(f32(sent), 1)
        else:
            dist.recv(f32(expected), 0)
        dist.barrier()

    return attempt_and_leave(action)


def messages(stage: Stage) -> Outcome:
    """send of 4 elements into recv of 8, and the other way round."""
    judge = stage.judge()
    for sizes in ((4, 8), (8, 4)):
        with stage.world(2, TIMEOUT) as world:
            world.start(exchange, *sizes)
            judge.raised(fates(world, limit=10), None, 1.0, "send", "recv")
    return judge.outcome()


def join(ctx: Ctx, store: str, rank: int, size: int, seconds: float) -> Seen:
    def action() -> None:
        dist.init_process_group(
            ctx.backend,
            store=dist.FileStore(store, -1) if store else ctx.store("join"),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
        )
        dist.all_reduce(torch.ones(1))

    return attempt_and_leave(action)


def twice(ctx: Ctx, seconds: float) -> Seen:
    return join(ctx, "", min(ctx.rank, 1), 3, seconds)  # ranks 0, 1 and again 1 of 3


def sizes(ctx: Ctx, seconds: float) -> Seen:
    return join(ctx, "", ctx.rank, 2 if ctx.rank == 0 else 3, seconds)


def stale(ctx: Ctx, path: str, seconds: float) -> Seen:
    return join(ctx, path, ctx.rank, 2, seconds)


def worlds(stage: Stage) -> Outcome:
    """A rank twice; world sizes that differ; a file:// store left over from another job."""
    total = stage.judge()

    def part(name: str, size: int, job: Callable[..., Seen], *args: object, words: str,
             may_work: bool = False) -> None:  # fmt: skip
        judge = Judge(stage.patience)
        with stage.world(size, init=False) as world:
            world.start(job, *args)
            found = fates(world, limit=15)
        works = all(isinstance(seen, Seen) and not seen.kind for seen in found.values())
        if works and may_work:
            total.notes.append(f"{name}: works")
            return
        judge.raised(found, None, 2.0, words, kind="Dist(Backend|Store|Network)Error")
        total.slowest = max(total.slowest or 0.0, judge.slowest or 0.0)
        total.sample = total.sample or judge.sample
        for text in judge.unmet:
            total.expect(False, f"{name}: {text}")

    part("a rank twice", 3, twice, 6.0, words="rank 1")
    part("world of 2 or 3", 3, sizes, 6.0, words="world|size|ranks")
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        path = str(Path(folder) / "store")
        with stage.world(2, init=False) as world:
            world.start(stale, path, 10.0)
            time.sleep(1.0)
            for pid in world.pids:
                os.kill(pid, 9)
        part("stale file store", 2, stale, path, 6.0, words="stale|file", may_work=True)
    return total.outcome()
