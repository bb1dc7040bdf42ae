"""Guarantees of Work."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from worlds.worker import Ctx


def wait_with_enough_time(ctx: Ctx) -> None:
    for _ in range(20):
        x = torch.ones(1000)
        work = dist.all_reduce(x, async_op=True)
        ctx.equal(work.wait(timedelta(seconds=30)), True)
        ctx.equal(float(x[0]), float(ctx.size))


def other_orders(ctx: Ctx) -> None:
    """Waits in reverse order, from other threads, from several threads, or not at all."""
    tensors = [torch.full((1000 * (i + 1),), float(i)) for i in range(12)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    threads = [threading.Thread(target=w.wait) for w in works[:4] for _ in range(2)]
    for thread in threads:
        thread.start()
    for work in reversed(works[4:]):
        work.wait()
    for thread in threads:
        thread.join()
    for i, t in enumerate(tensors):
        ctx.same(t, torch.full_like(t, float(i * ctx.size)))


def dropped(ctx: Ctx) -> None:
    """The caller need not keep the Work or the tensors."""
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    for i in range(30):
        dist.all_reduce(torch.full((50_000,), float(i)), async_op=True)
        outs = [torch.zeros(7000) for _ in range(ctx.size)]
        dist.all_gather(outs, torch.ones(7000), async_op=True)
        del outs
        dist.isend(torch.full((3000,), float(i)), right)
        garbage = [torch.full((50_000,), -1.0) for _ in range(3)]  # reuses freed memory
        del garbage
        gc.collect(0)
    for i in range(30):
        out = torch.zeros(3000)
        dist.recv(out, left)
        ctx.same(out, torch.full((3000,), float(i)), f"message {i}")
    x = torch.ones(5)
    dist.all_reduce(x)
    ctx.same(x, torch.full((5,), float(ctx.size)))


def freed_at_once(ctx: Ctx) -> None:
    """Results are right if the inputs are freed right after the call."""
    works = []
    for i in range(40):
        out = torch.zeros(20_000 * ctx.size)
        source = torch.full((20_000,), float(i + ctx.rank))
        works.append((i, out, dist.all_gather_into_tensor(out, source, async_op=True)))
        del source
        torch.full((20_000,), -7.0)
    for i, out, work in works:
        work.wait()
        want = torch.cat([torch.full((20_000,), float(i + r)) for r in range(ctx.size)])
        ctx.same(out, want, f"call {i}")
