"""A random program, the same on all ranks."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from contextlib import AbstractContextManager

import mycoll
import torch
import torch.distributed as dist
from worlds import arith
from worlds.worker import Ctx, stable_seed

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.float64)

# Shared tensors of 128 KiB and more are read in place, and of 1 MiB and more for reductions. For
# most dtypes these are the last two sizes, and the last one.
SIZES = (0, 1, 2, 63, 64, 1000, 4096, 30_011, 70_003, 300_001)
STEPS = 150
KINDS = ("all_reduce", "broadcast", "all_gather", "reduce", "reduce_scatter", "all_to_all")
KINDS += ("gather", "scatter", "coalesced", "objects", "p2p", "p2p", "barrier", "settle")
OWN_KINDS = ("put", "put", "operator", "operator")
Check = Callable[[], None]


@functools.cache
def pool(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return arith.values(dtype, 170_011, 0).repeat(13)  # enough for seven ranks


class Walk:
    """The walk of one rank. `rng` is the same on all ranks and makes all choices but one: `own`,
    which is different on each rank, chooses which tensors of a step are shared."""

    def __init__(self, ctx: Ctx, seed: int) -> None:
        self.ctx = ctx
        self.seed = seed
        self.rng = random.Random(seed)
        self.own = random.Random(stable_seed(seed, ctx.rank))
        # gloo has none of mycoll's own operations, and device tensors are not shared.
        self.has_own_operations = not ctx.gloo and torch.get_default_device().type == "cpu"
        self.share = 0.0  # the fraction of this step's tensors that are shared
        self.step = 0
        self.pending: list[tuple[dist.Work, Check, str]] = []
        members = [list(range(ctx.size))]
        if ctx.size > 2:
            members += [list(range(1, ctx.size)), list(range(0, ctx.size, 2))]
        members.append(list(range(ctx.size)))  # another group of the same ranks
        self.groups = [(m, dist.new_group(m)) for m in members[1:]]
        self.groups.append((members[0], dist.group.WORLD))

    def run(self) -> None:
        for self.step in range(STEPS):
            members, group = self.rng.choice(self.groups)
            kind = self.rng.choice(KINDS + OWN_KINDS if self.has_own_operations else KINDS)
            dtype, numel = self.rng.choice(DTYPES), self.rng.choice(SIZES)
            sync = self.rng.random() < 0.4
            root = self.rng.choice(members)
            tag = self.rng.randrange(3)
            order = self.rng.random()
            self.share = self.rng.choice((0, 0.5, 1, 1)) if self.has_own_operations else 0
            what = f"step {self.step} {kind} {dtype} {numel} of {members} sync={sync} root={root}"
            what += f" tag={tag} share={self.share}"
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
        """Waits for all pending works, in a different order on each rank."""
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
        """Random values that each rank can compute. The result must not be written to."""
        values = pool(dtype, torch.get_default_device())
        begin = stable_seed(self.seed, self.step, *key) % (values.numel() - numel)
        return values[begin : begin + numel]

    def all_same(self, got: list[torch.Tensor], wants: list[torch.Tensor]) -> None:
        for one, want in zip(got, wants, strict=True):
            self.ctx.same(one, want)

    def give(self, values: torch.Tensor) -> torch.Tensor:
        """Copies to an ordinary tensor, or to a view in the middle of a shared one."""
        if self.own.random() >= self.share:
            return values.clone()
        whole = mycoll.empty(values.numel() + 77, dtype=values.dtype)
        return whole[33 : 33 + values.numel()].copy_(values)

    def scope(self) -> AbstractContextManager[None]:
        shares = self.own.random() < self.share
        return mycoll.shared_tensors() if shares else contextlib.nullcontext()

    def all_reduce(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        op = ("SUM", "MAX", "MIN")[tag]
        parts = [self.part(dtype, numel, m) for m in members]
        x = self.give(parts[members.index(self.ctx.rank)])
        work = dist.all_reduce(x, op=arith.reduce_op(op), group=group, async_op=not sync)
        self.finish(what, sync, work, lambda: self.ctx.same(x, arith.reduced(op, parts)))

    def reduce(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        parts = [self.part(dtype, numel, m) for m in members]
        x = self.give(parts[members.index(self.ctx.rank)])
        work = dist.reduce(x, root, group=group, async_op=not sync)
        if self.ctx.rank == root:
            self.finish(what, sync, work, lambda: self.ctx.same(x, arith.reduced("SUM", parts)))
        else:
            self.finish(what, sync, work, lambda: None)

    def reduce_scatter(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        n, me = len(members), members.index(self.ctx.rank)
        parts = [self.part(dtype, numel * n, m) for m in members]
        out = self.give(torch.zeros(numel, dtype=dtype))
        mine = self.give(parts[me])
        work = dist.reduce_scatter_tensor(out, mine, group=group, async_op=not sync)
        slices = [p[me * numel : (me + 1) * numel] for p in parts]
        self.finish(what, sync, work, lambda: self.ctx.same(out, arith.reduced("SUM", slices)))

    def broadcast(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        want = self.part(dtype, numel, root)
        x = self.give(self.part(dtype, numel, self.ctx.rank))
        work = dist.broadcast(x, root, group=group, async_op=not sync)
        self.finish(what, sync, work, lambda: self.ctx.same(x, want))

    def all_gather(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        parts = [self.part(dtype, numel, m) for m in members]
        out = self.give(torch.zeros(numel * len(members), dtype=dtype))
        mine = self.give(parts[members.index(self.ctx.rank)])
        work = dist.all_gather_into_tensor(out, mine, group=group, async_op=not sync)
        self.finish(what, sync, work, lambda: self.ctx.same(out, torch.cat(parts)))

    def gather(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        parts = [self.part(dtype, numel, m) for m in members]
        outs = [self.give(torch.zeros_like(p)) for p in parts] if self.ctx.rank == root else None
        mine = self.give(parts[members.index(self.ctx.rank)])
        work = dist.gather(mine, outs, root, group=group, async_op=not sync)
        self.finish(what, sync, work, lambda: self.all_same(outs, parts) if outs else None)

    def scatter(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        parts = [self.part(dtype, numel, m) for m in members]
        ins = [self.give(p) for p in parts] if self.ctx.rank == root else None
        out = self.give(torch.zeros(numel, dtype=dtype))
        work = dist.scatter(out, ins, root, group=group, async_op=not sync)
        want = self.part(dtype, numel, self.ctx.rank)
        self.finish(what, sync, work, lambda: self.ctx.same(out, want))

    def all_to_all(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        me = self.ctx.rank

        def sent(of: int, to: int) -> torch.Tensor:  # tag 0: the same amount to each rank
            return self.part(dtype, min(numel, 40_009) // (1 + tag * (of + 2 * to) % 3), of, to)

        ins = [sent(me, m) for m in members]
        wants = [sent(m, me) for m in members]
        splits = [[p.numel() for p in parts] for parts in (wants, ins)] if tag else []
        out = self.give(torch.zeros_like(torch.cat(wants)))
        mine = self.give(torch.cat(ins))
        work = dist.all_to_all_single(out, mine, *splits, group=group, async_op=not sync)
        self.finish(what, sync, work, lambda: self.ctx.same(out, torch.cat(wants)))

    def coalesced(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        every = [[self.part(dtype, n, m, n) for m in members] for n in (numel, 5, numel // 2)]
        xs = [self.give(parts[members.index(self.ctx.rank)]) for parts in every]
        work = dist.all_reduce_coalesced(xs, group=group, async_op=not sync)
        wants = [arith.reduced("SUM", parts) for parts in every]
        self.finish(what, sync, work, lambda: self.all_same(xs, wants))

    def objects(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        want = [(self.step, m, "x" * (numel + m)) for m in members]
        got: list[object] = [None] * len(members)
        dist.all_gather_object(got, want[members.index(self.ctx.rank)], group=group)
        self.ctx.equal(got == want, True)

    def operator(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        """An operator of torch.ops.mycoll. These have no asynchronous form."""
        me = members.index(self.ctx.rank)
        name = ("all_reduce_", "all_gather", "reduce_scatter")[tag]
        numel -= numel % len(members) if name == "reduce_scatter" else 0
        parts = [self.part(dtype, numel, m) for m in members]
        x = self.give(parts[me])
        with self.scope():
            got = getattr(torch.ops.mycoll, name)(x, group.group_name)
        if name == "all_gather":
            self.ctx.same(got, torch.cat(parts))
        elif name == "all_reduce_":
            self.ctx.same(x, arith.reduced("SUM", parts))
        else:
            slices = [p.chunk(len(members))[me] for p in parts]
            self.ctx.same(got, arith.reduced("SUM", slices))

    def put(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        """Puts into the right neighbour's window, or writes to its mapped memory. The window is
        closed by all ranks, or dropped by each at any time."""
        n, at = len(members), members.index(self.ctx.rank)
        right, left = (at + 1) % n, (at - 1) % n
        memory = self.give(torch.zeros(numel + 5, dtype=dtype))
        window = mycoll.new_window(memory, group)
        mine = self.give(self.part(dtype, numel, self.ctx.rank))
        if tag == 0 and window.get_attr(right).access_type.name == "UNIFIED":
            window.map_remote_tensor(right)[:numel] = mine
        else:
            self.pending.append((window.put(mine, right, tag, not sync), lambda: None, what))
        self.pending.append((window.signal(right, not sync), lambda: None, what))
        want = torch.zeros(numel + 5, dtype=dtype)
        want[tag : tag + numel] = self.part(dtype, numel, members[left])

        def check() -> None:
            self.ctx.same(memory, want)
            if sync:
                window.tensor_deregister()

        self.finish(what, sync, window.wait_signal(left, not sync), check)

    def barrier(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        self.finish(what, sync, dist.barrier(group=group, async_op=not sync), lambda: None)

    def p2p(self, what, members, group, dtype, numel, sync, root, tag) -> None:
        """Each rank sends to its right neighbour with a tag. Receives do not block."""
        n, at = len(members), members.index(self.ctx.rank)
        if n == 1:
            return
        right, left = members[(at + 1) % n], members[(at - 1) % n]
        out = self.give(torch.zeros(numel, dtype=dtype))
        mine = self.give(self.part(dtype, numel, self.ctx.rank))
        send = dist.isend(mine, right, group=group, tag=tag)
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
