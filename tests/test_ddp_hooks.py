"""DDP's communication hooks, sharded optimizers, averaging of models."""

from __future__ import annotations

import inspect
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from worlds.training import (
    STEPS,
    batch,
    beside_gloo,
    compare,
    model,
    reference,
    sgd,
    train,
)
from worlds.worker import Ctx

pytestmark = pytest.mark.transports("shm")


def bf16_by_another_name(group, bucket):
    """DDP refuses a hook with the name bf16_compress_hook unless the backend is NCCL."""
    return default_hooks.bf16_compress_hook(group, bucket)


def hooks(ctx: Ctx) -> str:
    wanted = reference(ctx)
    for hook, tolerance in (
        (default_hooks.allreduce_hook, 1e-5),
        (default_hooks.fp16_compress_hook, 3e-2),
        (bf16_by_another_name, 1e-1),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 3e-2),
    ):
        with ctx.case(hook.__name__):
            net = model()
            wrapped = DistributedDataParallel(net, bucket_cap_mb=0.01)
            wrapped.register_comm_hook(None, hook)
            train(wrapped, [ctx.rank])
            compare(ctx, net, wanted, tolerance)
    for built_in in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        with ctx.case(f"{built_in}"):
            net = model()
            wrapped = DistributedDataParallel(net)
            wrapped._register_builtin_comm_hook(built_in)
            train(wrapped, [ctx.rank])
            compare(ctx, net, wanted, 3e-2)
    return ctx.digests()


@pytest.mark.worlds(2, 3)
def test_compressing_hooks(world):
    assert len(set(world.run(hooks))) == 1


# Up to torch 2.13 at least, these hooks expect the future's value that NCCL has, one tensor with a
# row for each rank; with gloo and mycoll it is a list of tensors. See docs/compatibility.md.
FOR_NCCL_ONLY = "fut.wait()[0]" in inspect.getsource(quantization_hooks)


def quantizing(ctx: Ctx, name: str) -> None:
    def job(group: dist.ProcessGroup) -> list[torch.Tensor]:
        net = DistributedDataParallel(model(), process_group=group)
        net.register_comm_hook(group, getattr(quantization_hooks, name))
        if FOR_NCCL_ONLY:
            with ctx.raises(RuntimeError, "ind"):
                train(net, [ctx.rank], steps=range(1))
            return []
        train(net, [ctx.rank])
        return list(net.parameters())

    beside_gloo(ctx, job)


@pytest.mark.parametrize("name", ["quantization_pertensor_hook", "quantization_perchannel_hook"])
def test_quantizing_hooks(reused, name):
    reused(2).run_in_group(quantizing, name)


def deep_model() -> nn.Sequential:
    torch.manual_seed(7)
    layers: list[nn.Module] = [nn.Linear(20, 64)]
    for _ in range(5):
        layers += [nn.Tanh(), nn.Linear(64, 64)]
    return nn.Sequential(*layers, nn.Linear(64, 1))


def power_sgd(ctx: Ctx) -> str:
    """PowerSGD's callbacks start operations and wait for them, while the backward pass starts
    others. All ranks must run them in one order, whatever their speeds. There are many buckets."""
    chance = ctx.random(ctx.rank)

    def delay(*_) -> None:
        time.sleep(chance.choice((0, 0, 0.0005, 0.003)))

    def job(group: dist.ProcessGroup) -> list[torch.Tensor]:
        net = deep_model()
        for layer in list(net)[1:]:  # whose inputs have gradients
            layer.register_full_backward_hook(delay)
        wrapped = DistributedDataParallel(net, bucket_cap_mb=0.02, process_group=group)
        state = powerSGD_hook.PowerSGDState(
            process_group=group, matrix_approximation_rank=2, start_powerSGD_iter=2
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        train(wrapped, [ctx.rank], steps=range(12))
        return list(net.parameters())

    group = dist.new_group()
    for parameter in job(group):
        ctx.equal(bool(parameter.isfinite().all()), True)
        ctx.digest(parameter.detach())
    dist.destroy_process_group(group)
    return ctx.digests()


@pytest.mark.worlds(2, 3)
def test_power_sgd_with_many_buckets(world):
    assert len(set(world.run(power_sgd))) == 1


def power_sgd_beside_gloo(ctx: Ctx) -> None:
    """One bucket, because with several the order of operations over gloo is undefined."""

    def job(group: dist.ProcessGroup) -> list[torch.Tensor]:
        net = model()
        wrapped = DistributedDataParallel(net, process_group=group)
        state = powerSGD_hook.PowerSGDState(
            process_group=group, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        train(wrapped, [ctx.rank], steps=range(5))
        return list(net.parameters())

    beside_gloo(ctx, job, 1e-3)


@pytest.mark.worlds(2)
def test_power_sgd_beside_gloo(world):
    world.run(power_sgd_beside_gloo)


def post_local_sgd(ctx: Ctx) -> str:
    """Gradients are averaged for two steps, then models are averaged every second step."""

    def job(group: dist.ProcessGroup) -> list[torch.Tensor]:
        net = model()
        wrapped = DistributedDataParallel(net, process_group=group)
        alone = dist.new_group([ctx.rank], use_local_synchronization=True)
        state = post_localSGD_hook.PostLocalSGDState(group, alone, start_localSGD_iter=2)
        wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager = averagers.PeriodicModelAverager(period=2, warmup_steps=2, process_group=group)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), averager)
        train(wrapped, [ctx.rank], optimizer, range(7))
        dist.destroy_process_group(alone)
        return list(net.parameters())

    beside_gloo(ctx, job)
    return ctx.digests()


@pytest.mark.worlds(2, 3)
def test_post_local_sgd(world):
    assert len(set(world.run(post_local_sgd))) == 1


def hierarchical(ctx: Ctx) -> str:
    """Models are averaged in pairs every second step, and among all ranks every fourth."""
    from collections import OrderedDict

    averager = hierarchical_model_averager.HierarchicalModelAverager(
        period_group_size_dict=OrderedDict([(2, 2), (4, ctx.size)]), warmup_steps=0
    )
    net = model()
    optimizer = sgd(net)
    for step in range(5):
        train(net, [ctx.rank], optimizer, [step])
        averager.average_parameters(net.parameters())
    for p in net.parameters():
        ctx.digest(p.detach())
    return ctx.digests()


def test_hierarchical_averaging(reused, transport):
    assert len(set(reused(4, transport).run_in_group(hierarchical))) == 1


def zero(ctx: Ctx) -> str:
    wanted = reference(ctx)
    for options in ({}, {"parameters_as_bucket_view": True}):
        net = model()
        wrapped = DistributedDataParallel(net)
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9, **options
        )
        train(wrapped, [ctx.rank], optimizer)
        compare(ctx, net, wanted)
    optimizer.consolidate_state_dict(to=0)
    if ctx.rank == 0:
        restored = torch.optim.SGD(wanted.parameters(), lr=0.01, momentum=0.9)
        restored.load_state_dict(optimizer.state_dict())
        ctx.equal(len(restored.state), len(list(wanted.parameters())))
    return ctx.digests()


@pytest.mark.worlds(2, 3)
def test_zero_redundancy_optimizer(world):
    assert len(set(world.run(zero))) == 1


def zero_in_hook(ctx: Ctx) -> str:
    """The optimizer's steps overlap with the backward pass; torch refuses this over gloo."""
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook

    wanted = reference(ctx)
    for name in ("hook_with_zero_step", "hook_with_zero_step_interleaved"):
        with ctx.case(name):
            net = model()
            wrapped = DistributedDataParallel(net, static_graph=True, gradient_as_bucket_view=True)
            optimizer = ZeroRedundancyOptimizer(
                net.parameters(),
                torch.optim.SGD,
                lr=0.01,
                momentum=0.9,
                overlap_with_ddp=True,
            )
            hook = getattr(ddp_zero_hook, name)(default_hooks.allreduce_hook, wrapped, optimizer)
            wrapped.register_comm_hook(None, hook)
            # The first passes only assign buckets to ranks; nothing is updated.
            for step in (0, 0, 0, *range(STEPS)):
                wrapped.zero_grad(set_to_none=False)
                x, y = batch(step, ctx.rank)
                nn.functional.mse_loss(wrapped(x), y).backward()
            compare(ctx, net, wanted)
    return ctx.digests()


@pytest.mark.worlds(2)
def test_zero_in_the_hook(world):
    assert len(set(world.run(zero_in_hook))) == 1
