"""torch.distributed.checkpoint: save, async_save, load, and load onto another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from worlds import arith
from worlds.training import close, compare, model, reference, sgd, train
from worlds.worker import Ctx


def sharded() -> nn.Module:
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(net)


def states(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    weights, moments = get_state_dict(net, optimizer)
    return {"model": weights, "optimizer": moments}


def saved(ctx: Ctx, folder: str, how: str) -> None:
    net = sharded()
    optimizer = sgd(net)
    train(net, [ctx.rank], optimizer, range(2))
    if how == "async":
        # async_save calls collectives from its own thread, which needs its own group.
        group = dist.new_group()
        future = dcp.async_save(states(net, optimizer), checkpoint_id=folder, process_group=group)
        # Training continues meanwhile; the state at the time of the call is saved.
        train(net, [ctx.rank], optimizer, range(2, 4))
        getattr(future, "upload_completion", future).result()
        dist.destroy_process_group(group)
    else:
        dcp.save(states(net, optimizer), checkpoint_id=folder)
    dist.barrier()


def loaded(ctx: Ctx, folder: str, ranks: int) -> None:
    """Continues where `ranks` ranks stopped, on any number of ranks."""
    wanted = model()
    optimizer = sgd(wanted)
    train(wanted, list(range(ranks)), optimizer, range(2))
    net = sharded()
    mine = sgd(net)
    state = states(net, mine)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(net, mine, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    compare(ctx, net, wanted)
    if ranks == ctx.size:
        train(net, [ctx.rank], mine, range(2, 4))
        compare(ctx, net, reference(ctx))


@pytest.mark.worlds(2)
@pytest.mark.parametrize("how", ["sync", "async"])
def test_save_and_load(world, pool, tmp_path: Path, how):
    folder = str(tmp_path / how)
    world.run(saved, folder, how)
    world.run(loaded, folder, 2)
    for other in (1, 3):
        pool.get(pool.spec(other, world.transport)).run(loaded, folder, 2)


def resharded(ctx: Ctx, folder: str) -> None:
    """A tensor saved in one layout is loaded in another; uneven parts, several dtypes."""
    mesh = init_device_mesh("cpu", (ctx.size,))
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64):
        whole = arith.values(dtype, (7, 5), 3)
        path = f"{folder}/{arith.short(dtype)}"
        dcp.save({"x": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=path)
        target = {"x": distribute_tensor(torch.zeros(7, 5, dtype=dtype), mesh, [Shard(1)])}
        dcp.load(target, checkpoint_id=path)
        ctx.same(target["x"].full_tensor(), whole, str(dtype))


@pytest.mark.worlds(2, 3)
def test_reshard(world, tmp_path: Path):
    world.run(resharded, str(tmp_path))


def whole_model(ctx: Ctx, folder: str) -> None:
    """DDP's state dict has no prefix, is equal on all ranks, and is saved once."""
    net = model()
    wrapped = DistributedDataParallel(net)
    train(wrapped, [ctx.rank])
    state = get_model_state_dict(wrapped)
    ctx.equal(sorted(state), sorted(net.state_dict()))
    dcp.save({"model": state, "step": 4}, checkpoint_id=folder)
    fresh = DistributedDataParallel(model())
    target = {"model": get_model_state_dict(fresh), "step": 0}
    dcp.load(target, checkpoint_id=folder)
    ctx.equal(target["step"], 4)
    for name, got in target["model"].items():
        close(ctx, got, net.state_dict()[name], name, 0)
    if ctx.rank == 0:  # also without a group
        alone = {"model": {k: torch.zeros_like(v) for k, v in net.state_dict().items()}}
        dcp.load(alone, checkpoint_id=folder, no_dist=True)
        for name, got in alone["model"].items():
            close(ctx, got, net.state_dict()[name], name, 0)
    dist.barrier()


@pytest.mark.worlds(2)
def test_ddp_checkpoint(world, tmp_path: Path):
    world.run(whole_model, str(tmp_path / "whole"))


def frozen(ctx: Ctx) -> None:
    """Options of the state_dict helpers."""
    net = sharded()
    net[0].requires_grad_(False)
    state = get_model_state_dict(net, options=StateDictOptions(ignore_frozen_params=True))
    ctx.equal(any(name.startswith("0.") for name in state), False)
    full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    ctx.equal(set(full), set(model().state_dict()))
    for name, want in model().state_dict().items():
        close(ctx, full[name], want, name, 0)


@pytest.mark.worlds(2)
def test_state_dict_options(world):
    world.run(frozen)
