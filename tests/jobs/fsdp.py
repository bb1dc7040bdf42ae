"""Training with FSDP2."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import fully_shard
from worlds.training import compare, model, reference, train
from worlds.worker import Ctx


def sharded(net: nn.Module, **options) -> nn.Module:
    for layer in net.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(net, **options)


def fsdp2(ctx: Ctx) -> None:
    wanted = reference(ctx)
    for options in ({}, {"reshard_after_forward": False}):
        with ctx.case(f"{options}"):
            net = sharded(model(), **options)
            train(net, [ctx.rank])
            compare(ctx, net, wanted)
