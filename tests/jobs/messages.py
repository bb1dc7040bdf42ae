"""Messages between two ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from worlds import arith
from worlds.worker import Ctx, stable_seed

SIZES = (0, 1, 17, 4099, 70_001, 1_000_003)


def neighbours(ctx: Ctx) -> tuple[int, int]:
    return (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size


def ring(ctx: Ctx) -> None:
    """Each rank sends to the right and receives from the left, blocking or not."""
    right, left = neighbours(ctx)
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64):
        for numel in SIZES if dtype == torch.float32 else SIZES[:-1]:
            name = f"ring/{arith.short(dtype)}/{numel}"
            if ctx.skips(name):
                continue
            parts = ctx.inputs(dtype, numel)
            with ctx.case(f"{name}/isend recv"):
                out = torch.zeros_like(parts[0])
                work = dist.isend(parts[ctx.rank], right)
                dist.recv(out, left)
                work.wait()
                ctx.same(out, parts[left])
            with ctx.case(f"{name}/irecv send"):
                out = torch.zeros_like(parts[0])
                work = dist.irecv(out, left)
                dist.send(parts[ctx.rank], right)
                work.wait()
                ctx.same(out, parts[left])
            with ctx.case(f"{name}/isend irecv, waited backwards"):
                out = torch.zeros_like(parts[0])
                works = [dist.isend(parts[ctx.rank], right), dist.irecv(out, left)]
                for work in reversed(works):
                    work.wait()
                ctx.same(out, parts[left])


def ping_pong(ctx: Ctx) -> None:
    x = torch.zeros(1, dtype=torch.int64)
    for i in range(200):
        if ctx.rank == i % 2:
            dist.send(torch.tensor([i]), 1 - ctx.rank)
        else:
            dist.recv(x, 1 - ctx.rank)
            ctx.equal(int(x), i)


def order_kept(ctx: Ctx) -> None:
    """Many messages of many sizes in flight between two ranks arrive in order."""
    sizes = [(i * 7919) % 5000 for i in range(60)]
    if ctx.rank == 0:
        works = [dist.isend(torch.full((n,), float(i)), 1) for i, n in enumerate(sizes)]
        for work in works:
            work.wait()
    elif ctx.rank == 1:
        for i, n in enumerate(sizes):
            out = torch.zeros(n)
            dist.recv(out, 0)
            ctx.same(out, torch.full((n,), float(i)), f"message {i}")


def tags_out_of_order(ctx: Ctx) -> None:
    for numel in (1, 5000, 300_007):
        with ctx.case(f"{numel} elements"):
            count = 6
            if ctx.rank == 0:
                works = [dist.isend(torch.full((numel,), t), 1, tag=t) for t in range(count)]
                for work in works:
                    work.wait()
            elif ctx.rank == 1:
                for t in (5, 0, 3, 4, 1, 2):
                    out = torch.zeros(numel, dtype=torch.int64)
                    dist.recv(out, 0, tag=t)
                    ctx.same(out, torch.full((numel,), t), f"tag {t}")


def any_source(ctx: Ctx) -> None:
    for numel in (1, 1000, 70_001):
        if ctx.rank == 0:
            seen = []
            for _ in range(ctx.size - 1):
                out = torch.zeros(numel, dtype=torch.int64)
                source = dist.recv(out)
                ctx.same(out, torch.full((numel,), source), f"what rank {source} sent")
                seen.append(source)
            ctx.equal(sorted(seen), list(range(1, ctx.size)), "senders")
        else:
            dist.send(torch.full((numel,), ctx.rank), 0)
        dist.barrier()


def to_oneself(ctx: Ctx) -> None:
    """The send or the receive may be called first. (torch refuses send() and recv() to itself.)"""
    for numel in SIZES:
        parts = [arith.values(torch.float32, numel, i) for i in range(3)]
        with ctx.case(f"{numel} elements, tags taken in another order"):
            works = [dist.isend(parts[i], ctx.rank, tag=i) for i in (0, 1, 2)]
            for i in (1, 0, 2):
                out = torch.zeros(numel)
                dist.irecv(out, ctx.rank, tag=i).wait()
                ctx.same(out, parts[i])
            for work in works:
                work.wait()
        with ctx.case(f"{numel} elements, received first"):
            outs = [torch.zeros(numel) for _ in parts]
            works = [dist.irecv(out, ctx.rank) for out in outs]
            works += [dist.isend(part, ctx.rank) for part in parts]
            for work in works:
                work.wait()
            for out, part in zip(outs, parts, strict=True):
                ctx.same(out, part)
    x = torch.ones(2)
    dist.all_reduce(x)
    ctx.equal(x.tolist(), [float(ctx.size)] * 2)


def batch(ctx: Ctx) -> None:
    """Several messages between all pairs, in both directions, in one batch."""
    peers = [r for r in range(ctx.size) if r != ctx.rank or not ctx.gloo]
    for numel in (0, 1, 1000, 200_003):
        with ctx.case(f"{numel} elements"):

            def message(src: int, dst: int, i: int, numel=numel) -> torch.Tensor:
                return arith.values(torch.float32, numel, stable_seed(src, dst, i))

            outs = {(p, i): torch.zeros(numel) for p in peers for i in range(2)}
            ops = [dist.P2POp(dist.irecv, out, p) for (p, _), out in outs.items()]
            ops += [
                dist.P2POp(dist.isend, message(ctx.rank, p, i), p) for p in peers for i in range(2)
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            for (p, i), out in outs.items():
                ctx.same(out, message(p, ctx.rank, i), f"from {p}")


def batch_one_sided(ctx: Ctx) -> None:
    """Ranks with different batches, or none, as in a pipeline."""
    right, left = ctx.rank + 1, ctx.rank - 1
    x = torch.full((1000,), float(ctx.rank))
    out = torch.zeros(1000)
    ops = []
    if right < ctx.size:
        ops.append(dist.P2POp(dist.isend, x, right))
    if left >= 0:
        ops.append(dist.P2POp(dist.irecv, out, left))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    ctx.equal(float(out[0]), float(max(left, 0)))


def beside_collectives(ctx: Ctx) -> None:
    """Pending messages do not block collectives, and pending collectives do not block messages."""
    right, left = neighbours(ctx)
    outs = [torch.zeros(1000) for _ in range(8)]
    receives = [dist.irecv(out, left, tag=i) for i, out in enumerate(outs)]
    for i in range(8):
        x = torch.full((5000,), float(i))
        dist.all_reduce(x)
        ctx.equal(float(x[-1]), float(i * ctx.size))
        dist.barrier()
    pending = [
        dist.all_reduce(torch.ones(100_000), async_op=True),
        *(dist.isend(torch.full((1000,), float(i)), right, tag=i) for i in reversed(range(8))),
        dist.all_reduce(torch.ones(100_000), async_op=True),
    ]
    for work in (*receives, *pending):
        work.wait()
    for i, out in enumerate(outs):
        ctx.same(out, torch.full((1000,), float(i)))
