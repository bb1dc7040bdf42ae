"""Training with DistributedDataParallel."""

from __future__ import annotations

import contextlib

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds.training import (
    batch,
    close,
    compare,
    model,
    reference,
    train,
)
from worlds.worker import Ctx


def ddp(ctx: Ctx) -> str:
    wanted = reference(ctx)
    for options in (
        {},
        {"bucket_cap_mb": 0.01},
        {"gradient_as_bucket_view": True, "find_unused_parameters": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
        {"broadcast_buffers": False, "init_sync": True},
    ):
        with ctx.case(f"{options}"):
            net = model()
            if ctx.rank:
                for p in net.parameters():  # DDP must make them equal first
                    p.data.mul_(3)
            wrapped = DistributedDataParallel(net, **options)
            train(wrapped, [ctx.rank])
            compare(ctx, net, wanted)
    return ctx.digests()


def accumulated(ctx: Ctx) -> None:
    """no_sync(): gradients of several backward passes are reduced once."""
    wanted = model()
    for step in range(3):
        for rank in range(ctx.size):
            x, y = batch(step, rank)
            (nn.functional.mse_loss(wanted(x), y) / ctx.size).backward()
    net = model()
    wrapped = DistributedDataParallel(net)
    for step in range(3):
        x, y = batch(step, ctx.rank)
        with wrapped.no_sync() if step < 2 else contextlib.nullcontext():
            nn.functional.mse_loss(wrapped(x), y).backward()
        if step == 1:
            alone = model()
            for earlier in range(2):
                x, y = batch(earlier, ctx.rank)
                nn.functional.mse_loss(alone(x), y).backward()
            close(ctx, net[0].weight.grad, alone[0].weight.grad, "before the reduction")
    for got, want in zip(net.parameters(), wanted.parameters(), strict=True):
        close(ctx, got.grad, want.grad, "gradient", 1e-4)
