"""The order of operations and a stream's other work."""

from __future__ import annotations

import torch
import torch.distributed as dist
from worlds.device import held
from worlds.device_tensors import NUMEL, full, here, is_all, slow, total, warm_up
from worlds.worker import Ctx, called


def after_the_current_stream(ctx: Ctx) -> None:
    """An operation runs after earlier work of the caller's stream and before later work."""
    warm_up(ctx)
    for own in (False, True):
        stream = torch.Stream(device=ctx.device) if own else here(ctx)
        for mode in ("sync", "async"):
            with ctx.case(f"{mode} on {'another stream' if own else 'the default stream'}"):
                before = here(ctx)
                torch.accelerator.set_stream(stream)
                x, gathered = full(ctx, 0), full(ctx, 0, NUMEL * ctx.size)
                x.add_(ctx.rank)
                slow(ctx)
                x.add_(1)
                called(mode, dist.all_reduce, x)
                y = x * 2
                called(mode, dist.all_gather_into_tensor, gathered, y)
                is_all(ctx, y, 2 * total(ctx))
                is_all(ctx, gathered, 2 * total(ctx))
                torch.accelerator.set_stream(before)


def host_does_not_wait(ctx: Ctx) -> None:
    """Neither the call nor wait() blocks the host, although the stream is held."""
    warm_up(ctx)
    for mode in ("sync", "async"):
        with ctx.case(mode):
            x, y = full(ctx, 0), full(ctx, 0)
            with held(here(ctx)):
                x.fill_(ctx.rank + 1)
                called(mode, dist.all_reduce, x)
                y.copy_(x)
                ctx.equal(here(ctx).query(), False, "the stream is done")
            is_all(ctx, y, total(ctx))
