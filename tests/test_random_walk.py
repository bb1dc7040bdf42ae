"""Seeded random sequences of operations, the same on all ranks, each result compared.

To repeat one: `pytest tests/test_random_walk.py --seed N`.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from worlds import arith
from worlds.worker import Ctx, stable_seed

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.float64)
SIZES = (0, 1, 2, 63, 64, 1000, 4096, 30_011, 150_001)
STEPS = 120
Check = Callable[[], None]


class Walk:
    """One rank's walk. All random choices come from `rng`, which is the same on all ranks."""

    def __init__(self, ctx: Ctx, seed: int) -> None:
        self.ctx = ctx
        self.rng = random.Random(seed)
        self.step = 0
        self.pending: list[tuple[dist.Work, Check, str]] = []
        members = [list(range(ctx.size))]
        if ctx.size > 2:
            members += [list(range(1, ctx.size)), list(range(0, ctx.size, 2))]
        members.append(list(range(ctx.size)))  # the same ranks as the world, another group
        self.groups = [(m, dist.new_group(m)) for m in members[1:]]
        self.groups.append((members[0], dist.group.WORLD))

    def run(self) -> None:
        for self.step in range(STEPS):
            members, group = self.rng.choice(self.groups)
            kind = self.rng.choice(
                ("all_reduce", "broadcast", "all_gather", "reduce", "reduce_scatter", "all_to_all")
                + ("p2p", "p2p", "barrier", "settle")
            )
            dtype, numel = self.rng.choice(DTYPES), self.rng.choice(SIZES)
            sync = self.rng.random() < 0.4
            root = self.rng.choice(members)
            tag = self.rng.randrange(3)
            order = self.rng.random()
            what = f"step {self.step} {kind} {dtype} {numel} of {members} sync={sync} root={root}"
            if kind == "settle":
                self.settle(order)
            elif self.ctx.rank in members:
                with self.ctx.case(what):
                    getattr(self, kind)(what, members, group, dtype, numel, sync, root, tag)
        self.settle(0.0)
        for members, group in self.groups[:-1]:
            if self.ctx.rank in members:
                dist.destroy_process_group(group)

    def settle(self, order: float) -> None:
        """Waits for all that is pending, in an order of each rank's own."""
        random.Random(order + self.ctx.rank).shuffle(self.pending)
        for work, check, what in self.pending:
            with self.ctx.case(what):
                if work is not None:
                    work.wait()
                check()
        self.pending.clear()

    def finish(self, what: str, sync: bool, work: dist.Work | None, check: Check) -> None:
        if sync or work is None:
            check()
        else:
            self.pending.append((work, check, what))

    def part(self, dtype: torch.dtype, numel: int, *key: int) -> torch.Tensor:
        return arith.values(dtype, numel, stable_seed(self.step, *key))

    def all_reduce(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        op = ("SUM", "MAX", "MIN")[tag]
        parts = [self.part(dtype, numel, m) for m in members]
        x = parts[members.index(self.ctx.rank)].clone()
        work = dist.all_reduce(x, op=arith.reduce_op(op), group=group, async_op=not sync)
        self.finish(what, sync, work, lambda: self.ctx.same(x, arith.reduced(op, parts)))

    def reduce(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        parts = [self.part(dtype, numel, m) for m in members]
        x = parts[members.index(self.ctx.rank)].clone()
        work = dist.reduce(x, root, group=group, async_op=not sync)
        if self.ctx.rank == root:
            self.finish(what, sync, work, lambda: self.ctx.same(x, arith.reduced("SUM", parts)))
        else:
            self.finish(what, sync, work, lambda: None)

    def reduce_scatter(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        n, me = len(members), members.index(self.ctx.rank)
        parts = [self.part(dtype, numel * n, m) for m in members]
        out = torch.zeros(numel, dtype=dtype)
        work = dist.reduce_scatter_tensor(out, parts[me].clone(), group=group, async_op=not sync)
        mine = [p[me * numel : (me + 1) * numel] for p in parts]
        self.finish(what, sync, work, lambda: self.ctx.same(out, arith.reduced("SUM", mine)))

    def broadcast(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        want = self.part(dtype, numel, root)
        x = self.part(dtype, numel, self.ctx.rank)
        work = dist.broadcast(x, root, group=group, async_op=not sync)
        self.finish(what, sync, work, lambda: self.ctx.same(x, want))

    def all_gather(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        parts = [self.part(dtype, numel, m) for m in members]
        out = torch.zeros(numel * len(members), dtype=dtype)
        mine = parts[members.index(self.ctx.rank)].clone()
        work = dist.all_gather_into_tensor(out, mine, group=group, async_op=not sync)
        self.finish(what, sync, work, lambda: self.ctx.same(out, torch.cat(parts)))

    def all_to_all(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        me = self.ctx.rank
        numel = min(numel, 5000)
        ins = torch.cat([self.part(dtype, numel, me, m) for m in members])
        want = torch.cat([self.part(dtype, numel, m, me) for m in members])
        out = torch.zeros_like(want)
        work = dist.all_to_all_single(out, ins, group=group, async_op=not sync)
        self.finish(what, sync, work, lambda: self.ctx.same(out, want))

    def barrier(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        self.finish(what, sync, dist.barrier(group=group, async_op=not sync), lambda: None)

    def p2p(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        """Everyone to its right neighbour, with a tag; receives are never blocking here."""
        n, at = len(members), members.index(self.ctx.rank)
        if n == 1:
            return
        right, left = members[(at + 1) % n], members[(at - 1) % n]
        out = torch.zeros(numel, dtype=dtype)
        send = dist.isend(self.part(dtype, numel, self.ctx.rank), right, group=group, tag=tag)
        receive = dist.irecv(out, left, group=group, tag=tag)
        want = self.part(dtype, numel, left)
        if sync:
            receive.wait()
            send.wait()
        else:
            self.pending.append((send, lambda: None, what))
        self.finish(what, sync, receive, lambda: self.ctx.same(out, want))


def walk(ctx: Ctx, seed: int) -> None:
    with ctx.case(f"seed {seed}"):
        Walk(ctx, seed).run()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    seed = metafunc.config.getoption("--seed")
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", [seed] if seed is not None else [1, 2, 3])


@pytest.mark.worlds(1, 2, 3, 4, 5, tcp=(3,))
def test_random_walk(world, seed):
    world.run(walk, seed, deadline=90)


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_walk_in_small_rounds(fresh, ranks):
    """What takes one round or two of shared memory takes hundreds."""
    env = {"MYCOLL_CHUNK_BYTES": "4096", "MYCOLL_SMALL_BYTES": "100"}
    fresh(ranks, "shm", env=env).run(walk, 4, deadline=90)
