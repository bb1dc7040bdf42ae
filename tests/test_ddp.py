"""Training on top: DDP, FSDP2, a sharded optimizer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import arith
from worlds.worker import Ctx

STEPS = 4


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 40), nn.Linear(40, 1))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = arith.values(torch.float32, (16, 20), 1000 * step + rank).clamp(-3, 3)
    return x, x.sum(1, keepdim=True)


def train(net: nn.Module, ranks: list[int], optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [nn.functional.mse_loss(net(x), y) for x, y in (batch(step, r) for r in ranks)]
        (sum(parts) / len(parts)).backward()
        optimizer.step()


def compare(ctx: Ctx, net: nn.Module, reference: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, got), want in zip(net.named_parameters(), reference.parameters(), strict=True):
        got, want = got.detach(), want.detach()
        if not torch.allclose(got, want, rtol=tolerance, atol=tolerance):
            ctx.fail(f"{name}: off by {(got - want).abs().max()}")
        ctx.digest(got)


def ddp(ctx: Ctx) -> str:
    reference = model()
    train(reference, list(range(ctx.size)))
    for options in (
        {},
        {"bucket_cap_mb": 0.01},
        {"gradient_as_bucket_view": True, "find_unused_parameters": True},
        {"static_graph": True},
    ):
        with ctx.case(f"{options}"):
            net = model()
            if ctx.rank:
                for p in net.parameters():  # DDP has to begin by making them equal
                    p.data.mul_(3)
            wrapped = DistributedDataParallel(net, **options)
            train(wrapped, [ctx.rank])
            compare(ctx, net, reference)
    return ctx.digests()


@pytest.mark.worlds(1, 2, 3)
def test_ddp(world):
    digests = world.run(ddp)
    assert len(set(digests)) == 1, "the weights of the ranks differ"


def hooks(ctx: Ctx) -> str:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    reference = model()
    train(reference, list(range(ctx.size)))
    for hook in (
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
    ):
        with ctx.case(hook.__name__):
            net = model()
            wrapped = DistributedDataParallel(net)
            wrapped.register_comm_hook(None, hook)
            train(wrapped, [ctx.rank])
            compare(ctx, net, reference, 1e-5 if "all" in hook.__name__ else 3e-2)
    return ctx.digests()


@pytest.mark.worlds(2)
def test_ddp_hooks(world):
    assert len(set(world.run(hooks))) == 1


def uneven(ctx: Ctx) -> None:
    """DDP's join(): ranks with different numbers of steps."""
    net = model()
    wrapped = DistributedDataParallel(net)
    with wrapped.join():
        for step in range(2 + ctx.rank):
            x, y = batch(step, ctx.rank)
            nn.functional.mse_loss(wrapped(x), y).backward()
    dist.barrier()


@pytest.mark.worlds(2, 3)
def test_ddp_join(world):
    world.run(uneven)


def fsdp(ctx: Ctx) -> None:
    from torch.distributed.fsdp import fully_shard

    reference = model()
    train(reference, list(range(ctx.size)))
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(net)
    train(net, [ctx.rank])
    for (name, got), want in zip(net.named_parameters(), reference.parameters(), strict=True):
        if not torch.allclose(got.detach().full_tensor(), want.detach(), rtol=1e-5, atol=1e-5):
            ctx.fail(f"{name} is off")


@pytest.mark.worlds(2, 3)
def test_fsdp2(world):
    world.run(fsdp)


def zero(ctx: Ctx) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    reference = model()
    train(reference, list(range(ctx.size)))
    net = model()
    wrapped = DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), optimizer_class=torch.optim.SGD, lr=0.01, momentum=0.9
    )
    train(wrapped, [ctx.rank], optimizer)
    compare(ctx, net, reference)
    return ctx.digests()


@pytest.mark.worlds(2)
def test_zero_redundancy_optimizer(world):
    assert len(set(world.run(zero))) == 1
