"""FSDP, FSDP2 and hybrid sharding on CPU: training, mixed precision, state dicts."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from jobs.fsdp import fsdp2, sharded
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from worlds.training import close, compare, model, reference, sgd, train
from worlds.worker import Ctx

pytestmark = pytest.mark.transports("shm")

ON_CPU = {
    "device_id": torch.device("cpu"),  # otherwise FSDP looks for an accelerator
    "auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=1000),
}


def compare_full(ctx: Ctx, net: FullyShardedDataParallel, wanted: torch.nn.Module) -> None:
    with FullyShardedDataParallel.summon_full_params(net):
        for (name, got), want in zip(net.named_parameters(), wanted.parameters(), strict=True):
            close(ctx, got, want, name)


@pytest.mark.worlds(1, 2, 3)
def test_fsdp2(world):
    world.run(fsdp2)


def fsdp2_mixed(ctx: Ctx) -> None:
    """Computes in bfloat16, reduces in float32 or bfloat16; the weights stay float32."""
    wanted = reference(ctx)
    for reduce_dtype in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, output_dtype=torch.float32
        )
        net = sharded(model(), mp_policy=policy)
        train(net, [ctx.rank])
        ctx.equal({p.dtype for p in net.parameters()}, {torch.float32})
        compare(ctx, net, wanted, 0.2)


@pytest.mark.worlds(2, 3)
def test_fsdp2_mixed_precision(world):
    world.run(fsdp2_mixed)


def fsdp2_accumulates(ctx: Ctx) -> None:
    """set_requires_gradient_sync: the gradients of two passes are reduced once."""
    wanted, net = model(), sharded(model())
    inputs = ctx.inputs(torch.float32, (2, 8, 20))
    for x in inputs:
        for part in x:
            (wanted(part).square().mean() / ctx.size).backward()
    for i, part in enumerate(inputs[ctx.rank]):
        net.set_requires_gradient_sync(i == 1)
        net(part).square().mean().backward()
    for (name, got), want in zip(net.named_parameters(), wanted.parameters(), strict=True):
        scale = want.grad.abs().max() + 1e-20
        close(ctx, got.grad.full_tensor() / scale, want.grad / scale, name, 1e-4)


@pytest.mark.worlds(2)
def test_fsdp2_accumulation(world):
    world.run(fsdp2_accumulates)


def fsdp2_state(ctx: Ctx) -> None:
    """The state of a model and optimizer is loaded into new ones, which continue the training."""
    wanted = reference(ctx)
    net = sharded(model())
    optimizer = sgd(net)
    train(net, [ctx.rank], optimizer, range(2))
    for full in (False, True):
        with ctx.case(f"full={full}"):
            options = StateDictOptions(full_state_dict=full, cpu_offload=full)
            weights, moments = copy.deepcopy(get_state_dict(net, optimizer, options=options))
            if full:
                # Rank 0 has the whole tensors; loading broadcasts them.
                ctx.equal(bool(weights), ctx.rank == 0, "state on this rank")
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            fresh = sharded(model())
            with torch.no_grad():
                for p in fresh.parameters():
                    p.zero_()
            again = sgd(fresh)
            set_model_state_dict(fresh, weights, options=options)
            set_optimizer_state_dict(fresh, again, moments, options=options)
            train(fresh, [ctx.rank], again, range(2, 4))
            compare(ctx, fresh, wanted)


@pytest.mark.worlds(2, 3)
def test_fsdp2_state_dict(world):
    world.run(fsdp2_state)


def hybrid(ctx: Ctx) -> None:
    """HSDP: sharded within a row of the mesh, replicated along its columns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    wanted = reference(ctx)
    with ctx.case("FSDP2"):
        net = sharded(model(), mesh=mesh)
        train(net, [ctx.rank])
        compare(ctx, net, wanted)
        state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
        if ctx.rank == 0:
            close(ctx, state["0.weight"], wanted[0].weight, "full state dict")
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        with ctx.case(f"FSDP {strategy}"):
            one = FullyShardedDataParallel(
                model(), device_mesh=mesh, sharding_strategy=strategy, **ON_CPU
            )
            train(one, [ctx.rank])
            compare_full(ctx, one, wanted)


def test_hybrid_sharding(reused, transport):
    reused(4, transport).run_in_group(hybrid)


def fsdp1(ctx: Ctx) -> None:
    wanted = reference(ctx)
    for options in (
        {},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        {"use_orig_params": True},
        {"cpu_offload": CPUOffload(offload_params=False), "limit_all_gathers": False},
    ):
        with ctx.case(f"{options}"):
            net = FullyShardedDataParallel(model(), **ON_CPU, **options)
            train(net, [ctx.rank])
            compare_full(ctx, net, wanted)


@pytest.mark.worlds(2, 3)
def test_fsdp1(world):
    world.run(fsdp1)


def fsdp1_mixed(ctx: Ctx) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = FullyShardedDataParallel(model(), **ON_CPU, mixed_precision=precision)
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(ctx.rank))
    optimizer = sgd(net)
    losses: list[float] = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = net(x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    ctx.equal(losses[-1] < losses[0], True, f"losses {losses}")
    ctx.equal({p.dtype for p in net.parameters()}, {torch.float32})


@pytest.mark.worlds(2)
def test_fsdp1_mixed_precision(world):
    world.run(fsdp1_mixed)


def fsdp1_state(ctx: Ctx) -> None:
    wanted = reference(ctx)
    for kind in (
        StateDictType.FULL_STATE_DICT,
        StateDictType.SHARDED_STATE_DICT,
        StateDictType.LOCAL_STATE_DICT,
    ):
        with ctx.case(f"{kind}"):
            net = FullyShardedDataParallel(model(), **ON_CPU)
            optimizer = sgd(net)
            train(net, [ctx.rank], optimizer, range(2))
            with FullyShardedDataParallel.state_dict_type(net, kind):
                state = copy.deepcopy(net.state_dict())
                moments = (
                    None
                    if kind == StateDictType.LOCAL_STATE_DICT
                    else FullyShardedDataParallel.optim_state_dict(net, optimizer)
                )
                with torch.no_grad():
                    for p in net.parameters():
                        p.zero_()
                net.load_state_dict(state)
                if moments is not None:
                    optimizer = sgd(net)
                    optimizer.load_state_dict(
                        FullyShardedDataParallel.optim_state_dict_to_load(net, optimizer, moments)
                    )
            train(net, [ctx.rank], optimizer, range(2, 4))
            compare_full(ctx, net, wanted)


@pytest.mark.worlds(2)
def test_fsdp1_state_dict(world):
    world.run(fsdp1_state)


def state_of_ddp(ctx: Ctx) -> None:
    """The state of a whole model is loaded into a sharded one."""
    whole = reference(ctx)
    net = sharded(model())
    set_model_state_dict(
        net,
        whole.state_dict() if ctx.rank == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    compare(ctx, net, whole, 0)
    dist.barrier()


@pytest.mark.worlds(2)
def test_whole_state_into_shards(world):
    world.run(state_of_ddp)
