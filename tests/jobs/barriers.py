"""Barriers, one after another and beside other operations."""

from __future__ import annotations

import time

import torch.distributed as dist
from worlds.worker import Ctx


def barriers(ctx: Ctx) -> None:
    """No rank leaves a barrier before all have entered it, as a counter in the store shows."""
    store = ctx.store("barriers")
    for i in range(20):
        if ctx.rank == i % ctx.size:
            time.sleep(0.002)
        store.add(f"at{i}", 1)
        if i % 3 == 0:
            dist.barrier()
        elif i % 3 == 1:
            dist.barrier(async_op=True).wait()
        else:
            dist.barrier(device_ids=[0])
        ctx.equal(store.add(f"at{i}", 0), ctx.size, f"arrived at barrier {i}")
