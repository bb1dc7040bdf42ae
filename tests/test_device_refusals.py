"""Wrong arguments with device tensors, and operations that NCCL does not support, raise in the
call, and the group remains usable."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from worlds.device_tensors import full, is_all
from worlds.worker import Ctx


def refused(ctx: Ctx) -> None:
    """Wrong arguments raise in the call."""
    cpu, x = torch.ones(4), full(ctx, 1, 4)
    errors = (RuntimeError, ValueError, TypeError)
    with ctx.case("tensors of two devices in one call"), ctx.raises(errors):
        dist.all_gather([x.clone(), cpu.clone()], x)
    with ctx.case("CPU and device"), ctx.raises(errors):
        dist.all_gather_into_tensor(torch.ones(8), x)
    for tensors in ([x, cpu, cpu], [cpu, cpu, x], [x, cpu]):
        with ctx.case("CPU and device, coalesced"), ctx.raises(ValueError, "must be on one device"):
            dist.all_reduce_coalesced([tensor.clone() for tensor in tensors])
    with ctx.case("sizes"), ctx.raises(errors):
        dist.all_gather_into_tensor(full(ctx, 0, 7), x)
    with ctx.case("dtypes"), ctx.raises(errors):
        dist.all_gather_into_tensor(full(ctx, 0, 8).int(), x)
    with ctx.case("a rank that does not exist"), ctx.raises(errors):
        dist.broadcast(x, 5)
    with ctx.case("no meaning"), ctx.raises(errors):
        dist.all_reduce(x, op=dist.ReduceOp.BAND)
    dist.all_reduce(x)
    is_all(ctx, x, ctx.size)


def refused_on_two_devices(ctx: Ctx) -> None:
    """Lists of tensors on two devices, in either order."""
    count = torch.accelerator.device_count()
    if count < 2:
        return
    other = torch.device(ctx.device.type, (ctx.device.index + 1) % count)
    peer = 1 - ctx.rank
    for devices in ((ctx.device, other), (other, ctx.device)):
        a, b = (torch.ones(4, device=device) for device in devices)
        calls = {
            "all_gather": lambda a=a, b=b: dist.all_gather([a, b], a.clone()),
            "all_gather's input": lambda a=a, b=b: dist.all_gather([a, a.clone()], b),
            "all_gather_into_tensor": lambda a=a, b=b: dist.all_gather_into_tensor(a, b[:2]),
            "reduce_scatter": lambda a=a, b=b: dist.reduce_scatter(a.clone(), [a, b]),
            "reduce_scatter's output": lambda a=a, b=b: dist.reduce_scatter(b, [a, a.clone()]),
            "all_to_all": lambda a=a, b=b: dist.all_to_all([a.clone(), a.clone()], [a, b]),
            "all_to_all_single": lambda a=a, b=b: dist.all_to_all_single(a, b),
            "all_reduce_coalesced": lambda a=a, b=b: dist.all_reduce_coalesced([a, b]),
            "a batch": lambda a=a, b=b: dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, a, peer), dist.P2POp(dist.irecv, b, peer)]
            ),
        }
        if ctx.rank == 0:
            calls["gather"] = lambda a=a, b=b: dist.gather(a.clone(), [a, b])
            calls["scatter"] = lambda a=a, b=b: dist.scatter(a.clone(), [a, b])
        for name, call in calls.items():
            with ctx.case(name), ctx.raises((RuntimeError, ValueError), "device"):
                call()
    x = full(ctx, 1, 4)
    dist.all_reduce(x)
    is_all(ctx, x, ctx.size)


def refused_by_nccl(ctx: Ctx) -> None:
    """Operations that NCCL does not support raise; the group remains usable."""
    x = full(ctx, 1, 4)
    for dtype, op in ((torch.int16, "SUM"), (torch.int32, "BAND")):
        with ctx.case(f"{dtype} {op}"), ctx.raises((RuntimeError, ValueError), "NCCL"):
            dist.all_reduce(x.to(dtype), op=getattr(dist.ReduceOp, op))
    with ctx.case("any source"), ctx.raises((RuntimeError, ValueError), "name the source"):
        dist.recv(x)
    dist.all_reduce(x)
    is_all(ctx, x, ctx.size)


@pytest.mark.worlds(2)
def test_wrong_arguments(device_world):
    device_world.run(refused)


@pytest.mark.worlds(2)
def test_tensors_of_two_devices(device_world):
    device_world.run(refused_on_two_devices)


@pytest.mark.worlds(2, paths=["nccl"])
def test_what_nccl_cannot_do(device_world):
    device_world.run(refused_by_nccl)
