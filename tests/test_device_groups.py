"""Groups made from groups: their NCCL communicators, and collectives on device tensors."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from unittest import mock

import mycoll
import pytest
import torch
import torch.distributed as dist
from worlds import device
from worlds.device_tensors import full, is_all, slow, warm_up
from worlds.worker import Ctx


def calls(
    ctx: Ctx, names: Sequence[str] = ("ncclCommInitRankConfig", "ncclCommSplit")
) -> dict[str, int]:
    """How often this process has called these functions of NCCL; empty on a real GPU."""
    kind = ctx.device.type
    if ctx.setup.path != "nccl" or not (kind == "standin" or device.is_scripted(kind)):
        return {}
    return {name: device.count_nccl(name) for name in names}


def works(ctx: Ctx, group: dist.ProcessGroup, ranks: list[int], what: str) -> None:
    for where in (ctx.device, torch.device("cpu")):
        x = torch.full((1000,), float(ctx.rank), device=where)
        dist.all_reduce(x, group=group)
        ctx.same(x, torch.full((1000,), float(sum(ranks))), f"{what}, on {where}")


def splits(ctx: Ctx) -> None:
    ctx.init(device_id=ctx.device)
    before = calls(ctx)
    # A communicator must not be split while operations are outstanding: a collective, and then
    # messages, which have no order with others. The first messages connect and wait for the device.
    x, y = full(ctx, 1), full(ctx, 1)
    ring = [
        dist.P2POp(dist.isend, y, (ctx.rank + 1) % ctx.size),
        dist.P2POp(dist.irecv, full(ctx, 0), (ctx.rank - 1) % ctx.size),
    ]
    dist.batch_isend_irecv(ring)
    slow(ctx)
    pending = [dist.all_reduce(x, async_op=True)]
    for _ in range(10):
        slow(ctx)
    pending += dist.batch_isend_irecv(ring)
    # Rank 3 is in none of the new groups.
    child = dist.split_group(split_ranks=[[0, 1], [2]])
    for work in pending:
        work.wait()
    is_all(ctx, x, ctx.size)
    parts = {0: [0, 1], 1: [0, 1], 2: [2]}
    is_member = isinstance(child, dist.ProcessGroup)
    ctx.equal(is_member, ctx.rank in parts, "membership")
    if is_member:
        works(ctx, child, parts[ctx.rank], "a split")
        backend = child._get_backend(ctx.device)
        ctx.equal(backend.device_transport(), ctx.setup.path.split("-")[0])
    works(ctx, dist.group.WORLD, [0, 1, 2, 3], "the parent")
    if before:
        after = calls(ctx)
        ctx.equal(after["ncclCommSplit"] - before["ncclCommSplit"], 1, "splits")
        name = "ncclCommInitRankConfig"
        ctx.equal(after[name] - before[name], 0, "communicators that were not split off")
    # Another split, also of other ranks; and a split of a split.
    again = dist.split_group(split_ranks=[[0, 1], [3, 2]])
    members = [0, 1] if ctx.rank < 2 else [2, 3]
    works(ctx, again, members, "a second split")
    if ctx.rank < 2:
        alone = dist.split_group(again, split_ranks=[[0], [1]])
        works(ctx, alone, [ctx.rank], "a split of a split")
    dist.barrier()
    dist.destroy_process_group()


def unwilling(ctx: Ctx) -> None:
    """If one rank fails to make its group, the other ranks' groups connect without it."""
    ctx.init(device_id=ctx.device)
    before = calls(ctx)
    parts = [[rank] for rank in range(ctx.size)]
    if ctx.rank == 1:
        broken = mock.patch.object(
            dist.ProcessGroup, "split_group", side_effect=MemoryError("mine")
        )
        with broken, ctx.raises(MemoryError, "mine"):
            dist.split_group(split_ranks=parts)
    else:
        works(ctx, dist.split_group(split_ranks=parts), [ctx.rank], "a split without rank 1")
    works(ctx, dist.group.WORLD, list(range(ctx.size)), "the parent")
    if before:
        ctx.equal(calls(ctx)["ncclCommSplit"] - before["ncclCommSplit"], 0, "splits")
    dist.destroy_process_group()


def subgroups(ctx: Ctx) -> None:
    """new_group involves only its members."""
    ctx.init(device_id=ctx.device)
    for ranks in ([0, 2], [1], [3, 1]):
        group = dist.new_group(ranks)
        if ctx.rank in ranks:
            works(ctx, group, ranks, f"new_group({ranks})")
    if ctx.rank in (0, 3):
        group = dist.new_group([0, 3], use_local_synchronization=True)
        works(ctx, group, [0, 3], "new_group with local synchronization")
    dist.barrier()
    dist.destroy_process_group()


def meshes(ctx: Ctx) -> None:
    """A mesh of a job that is bound to devices also splits NCCL's communicator."""
    ctx.init(device_id=ctx.device)
    before = calls(ctx)
    mesh = dist.init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("outer", "inner"))
    row = ctx.rank // 2 * 2
    works(ctx, mesh.get_group("inner"), [row, row + 1], "the inner dimension")
    works(ctx, mesh.get_group("outer"), [ctx.rank % 2, ctx.rank % 2 + 2], "the outer dimension")
    if before and torch.__version__ >= "2.12":  # earlier versions split only for CUDA
        after = calls(ctx)
        ctx.equal(after["ncclCommSplit"] - before["ncclCommSplit"], 2, "splits")
        name = "ncclCommInitRankConfig"
        ctx.equal(after[name] - before[name], 0, "communicators that were not split off")
    dist.barrier()
    dist.destroy_process_group()


def generations(ctx: Ctx) -> None:
    """Groups made from handles, each with other ranks and with its own communicators."""
    ctx.init(device_id=ctx.device)
    endpoint = mycoll.Endpoint(timeout=timedelta(seconds=30))
    handles = [""] * ctx.size
    dist.all_gather_object(handles, endpoint.handle)
    former = None
    for uuid, members in enumerate(([0, 1, 2, 3], [2, 0, 3], [1, 3, 2, 0])):
        if ctx.rank in members:
            group = endpoint.form(uuid, [handles[rank] for rank in members])
            if ctx.device.type != "cuda":
                backend = group._get_backend(torch.device("cpu"))
                group._register_backend(ctx.device, dist.ProcessGroup.BackendType.CUSTOM, backend)
            if former is not None:
                former.abort()
            works(ctx, group, members, f"generation {uuid}")
            former = group
        dist.barrier()
    dist.destroy_process_group()


def barriers(ctx: Ctx) -> None:
    """In a group that is bound to a device, the first barrier also waits for the device."""
    ctx.init(device_id=ctx.device)
    here = torch.accelerator.current_stream()
    for _ in range(2):
        slow(ctx)
    dist.barrier()
    ctx.equal(here.query(), True, "the current stream is done")
    child = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    for _ in range(2):
        slow(ctx)
    dist.barrier(child)
    if ctx.setup.path == "nccl":  # else nothing was split, and the child has no device yet
        ctx.equal(here.query(), True, "the current stream is done after a barrier of a child")
    torch.accelerator.synchronize()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "job", [splits, subgroups, meshes, generations, barriers], ids=lambda job: job.__name__
)
@pytest.mark.parametrize("path", ["nccl", "host"])
def test_groups_of_a_bound_job(reused_device_world, path, job):
    reused_device_world(4, path).run(job)


@pytest.mark.parametrize("path", ["nccl", "host"])
def test_a_rank_that_cannot_split(reused_device_world, path):
    reused_device_world(3, path).run(unwilling)


def ends_without_destroy(ctx: Ctx) -> dict[str, int]:
    """The functions of NCCL that are called at exit. Ending a communicator needs all ranks of the
    host, and the other ranks may continue for minutes."""
    from mycoll import _registration

    warm_up(ctx)
    names = ("ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort", "ncclCommRevoke")
    before = calls(ctx, names)
    _registration.close_all()
    return {name: count - before[name] for name, count in calls(ctx, names).items()}


def test_exit_does_not_call_nccl(fresh_device_world):
    for called in fresh_device_world(2, "nccl").run(ends_without_destroy):
        assert set(called.values()) <= {0}, called


def without_gpu(ctx: Ctx, count: int) -> None:
    """A CUDA build of torch names CUDA as its accelerator with and without a GPU. Without one, no
    group for device tensors is made."""
    cuda = mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    with cuda, mock.patch.object(torch.cuda, "device_count", lambda: count):
        ctx.init()
    x = torch.full((10,), float(ctx.rank), device=ctx.device)
    if count == 0:
        with ctx.raises(ValueError, "had no accelerator when the group was made"):
            dist.all_reduce(x)
        x = x.cpu()
    dist.all_reduce(x)
    ctx.same(x, torch.full((10,), float(sum(range(ctx.size)))))
    dist.destroy_process_group()


def on_rocm(ctx: Ctx) -> None:
    """torch calls devices of ROCm "cuda", too. CPU tensors work as usual."""
    why = "mycoll does not support ROCm"
    x, cpu = full(ctx, ctx.rank), torch.full((10,), float(ctx.rank))
    with mock.patch.object(torch.version, "hip", "6.4"):
        ctx.init()
        for work in (lambda: dist.all_reduce(x), lambda: dist.isend(x, 1 - ctx.rank)):
            with ctx.raises(ValueError, f"there are tensors on {ctx.device}, but {why}"):
                work()
        dist.all_reduce(cpu)
        ctx.same(cpu, torch.full((10,), float(sum(range(ctx.size)))))
        dist.destroy_process_group()
        with ctx.raises(ValueError, f"device_id is {ctx.device}, but {why}"):
            ctx.init("bound", device_id=ctx.device)


def test_rocm_is_refused(fresh_device_world):
    fresh_device_world(2, "host", init=False).run(on_rocm)


@pytest.mark.parametrize("count", [0, 1])
def test_no_groups_for_devices_without_one(reused_device_world, count):
    reused_device_world(2, "host").run(without_gpu, count)
