"""Groups that are made by each function of torch."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from jobs.groups import check, destroyed_in_any_order, subsets
from mycoll import _compat
from torch.distributed.device_mesh import init_device_mesh
from worlds import arith
from worlds.worker import Ctx

pytestmark = pytest.mark.transports("shm")


@pytest.mark.worlds(2, 3, 5, tcp=(3,))
def test_new_group(world):
    world.run(subsets)


def overlapping(ctx: Ctx) -> None:
    """Several groups in use at the same time, with sync work of one between async work of
    others."""
    ranks = list(range(ctx.size))
    lists = [[r for r in ranks if r != out] for out in ranks] + [ranks, ranks]
    groups = [(members, dist.new_group(members)) for members in lists]
    for _ in range(3):
        works = []
        for i, (members, group) in enumerate(groups):
            if ctx.rank in members:
                x = torch.full((100 + i,), 1.0)
                works.append((x, len(members), dist.all_reduce(x, group=group, async_op=True)))
        for members, group in groups:
            if ctx.rank in members:
                check(ctx, group, members)
        for x, n, work in works:
            work.wait()
            ctx.equal(float(x[-1]), float(n))
    for members, group in groups:
        if ctx.rank in members:
            dist.destroy_process_group(group)


@pytest.mark.worlds(3, 4)
def test_overlapping_groups(world):
    world.run(overlapping)


def local_synchronization(ctx: Ctx) -> None:
    members = [0, 2] if ctx.rank != 1 else [1]
    group = dist.new_group(members, use_local_synchronization=True)
    check(ctx, group, members)
    dist.destroy_process_group(group)


@pytest.mark.worlds(3)
def test_new_group_with_local_synchronization(world):
    world.run(local_synchronization)


def different_numbers_of_groups(ctx: Ctx) -> None:
    """torch names such a group after the number of groups that the rank is in."""
    if ctx.rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    if ctx.rank != 1:
        with ctx.raises(dist.DistBackendError, "made the same groups in the same order"):
            dist.new_group([0, 2], timeout=timedelta(seconds=2), use_local_synchronization=True)
    dist.barrier()


def test_local_synchronization_after_other_groups(reused, transport, mycoll_only):
    reused(3, transport).run_in_group(different_numbers_of_groups)


def options_of_new_group(ctx: Ctx) -> None:
    group = dist.new_group(timeout=timedelta(seconds=33), group_desc="mine")
    ctx.equal(group.group_desc, "mine")
    check(ctx, group, list(range(ctx.size)))
    dist.destroy_process_group(group)


@pytest.mark.worlds(2)
def test_options_of_new_group(world):
    world.run(options_of_new_group)


def subgroups(ctx: Ctx) -> None:
    mine, groups = dist.new_subgroups(2)
    first = ctx.rank // 2 * 2
    check(ctx, mine, [first, first + 1])
    by_list, more = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    check(ctx, by_list, [0, 3] if ctx.rank in (0, 3) else [1, 2])
    ctx.equal(len(groups) + len(more), 4)


def test_new_subgroups(reused, transport):
    reused(4, transport).run_in_group(subgroups)


def meshes(ctx: Ctx) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    row, column = divmod(ctx.rank, 2)
    check(ctx, mesh["columns"].get_group(), [2 * row, 2 * row + 1])
    check(ctx, mesh["rows"].get_group(), [column, column + 2])
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    whole = arith.values(torch.float32, (8, 6), 3)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    ctx.same(sharded.full_tensor(), whole)
    again = sharded.redistribute(mesh, [Replicate(), Shard(0)])
    ctx.same(again.full_tensor(), whole)
    local = DTensor.from_local(torch.ones(2), mesh["rows"], [Replicate()])
    ctx.same(local.full_tensor(), torch.ones(2))


def test_device_mesh(reused, transport):
    reused(4, transport).run_in_group(meshes)


def split(ctx: Ctx) -> bool:
    parent = dist.group.WORLD
    members = [0, 1] if ctx.rank < 2 else [2, 3]
    if not parent._get_backend(torch.device("cpu")).supports_splitting:
        return False
    # torch passes one backend's options to all backends of a group.
    others = None if ctx.gloo else dist.ProcessGroupGloo._Options()
    child = parent.split_group(members, opts=others, group_name=f"split{members}")
    x = torch.full((3,), float(ctx.rank))
    child.allreduce([x]).wait()
    ctx.equal(float(x[0]), float(sum(members)))
    return True


def test_split_group(reused, transport):
    """Calls the method, because dist.split_group needs an accelerator."""
    if not hasattr(dist.ProcessGroup, "split_group"):
        pytest.skip("this torch has no ProcessGroup.split_group")
    assert all(reused(4, transport).run_in_group(split)), "the backend does not support splitting"


def part_of(ctx: Ctx, parts: list[list[int]], group=None, members=None, **more) -> None:
    """Splits a group. parts: ranks of the parent; members: the same ranks in the job."""
    made = dist.split_group(group, parts, timeout=timedelta(seconds=20), **more)
    mine = next((part for part in members or parts if ctx.rank in part), None)
    ctx.equal(isinstance(made, dist.ProcessGroup), mine is not None, f"a member of {mine}")
    if mine is not None:
        ctx.equal(sorted(dist.get_process_group_ranks(made)), mine)
        if "backend" not in more:
            ctx.equal(dist.get_backend(made), ctx.backend)
        check(ctx, made, mine)


def splits(ctx: Ctx) -> None:
    """The ranks of a split are in different numbers of groups, from which torch up to 2.14 makes
    different names."""
    kept = [dist.new_group([0, 1])]
    part_of(ctx, [[0, 2], [1, 3]])
    part_of(ctx, [[0, 1]])
    part_of(ctx, [[0, 1]])
    part_of(ctx, [[0, 2], [3, 1]], members=[[0, 2], [1, 3]])
    kept.append(dist.new_group([0, 1, 3]))
    if ctx.rank != 2:
        part_of(ctx, [[0, 2], [1]], kept[-1], members=[[0, 3], [1]])
    # In these versions torch's wrapper for DETAIL cannot shrink.
    is_wrapped = torch.__version__ < "2.13" and os.environ["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    if ctx.rank in (0, 3) and not is_wrapped:  # torch may make two names for this group
        smaller = dist.shrink_group([1], group=kept[-1])
        check(ctx, smaller, [0, 3])
        part_of(ctx, [[0, 1]], smaller, members=[[0, 3]])
    part_of(ctx, [[0, 3], [1, 2]], backend="cpu:mycoll")
    part_of(ctx, [[0, 3], [1, 2]], backend="mycoll")
    for wrong in ("cpu:gloo", "xpu:mycoll", "gloo"):
        try:
            dist.split_group(split_ranks=[[0, 1]], backend=wrong)
        except ValueError as error:
            ctx.equal("no part of the parent's backends" in str(error), True, str(error))
        else:
            raise AssertionError(wrong)
    part_of(ctx, [[0, 1], [2, 3]])


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_split_group_of_ranks_in_different_groups(reused, transport, backend, debug):
    if backend == "gloo":
        pytest.skip("torch refuses split_group without an accelerator")
    reused(4, transport, env=(("TORCH_DISTRIBUTED_DEBUG", debug),)).run_in_group(splits)


def merge(ctx: Ctx) -> None:
    """Two groups of two are merged twice; the store determines the order of the ranks."""
    mine, _ = dist.new_subgroups(2)
    for round_ in range(2):
        store = dist.PrefixStore(f"merge{round_}", ctx.store("merge"))
        merged = mine.merge_remote_group(store, 4, timedelta(seconds=30), f"merged{round_}")
        ctx.equal(merged.size(), 4)
        x = torch.full((3,), 10.0**ctx.rank)
        merged.allreduce([x]).wait()
        ctx.equal(x.tolist(), [1111.0] * 3)
        places = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
        merged.allgather([places], [torch.tensor([merged.rank()])]).wait()
        ctx.equal([int(place) for place in places], [0, 1, 2, 3])
        merged.shutdown()
    x = torch.ones(1)
    dist.all_reduce(x, group=mine)
    ctx.equal(float(x), 2.0)


def test_merge_remote_group(reused, transport):
    if not hasattr(dist.ProcessGroup, "merge_remote_group"):
        pytest.skip("this torch has no ProcessGroup.merge_remote_group")
    reused(4, transport).run_in_group(merge)


def shrink(ctx: Ctx) -> None:
    """Shrinks a subgroup, then the world without rank 3, then the world again."""
    sub = dist.new_group([0, 1, 2])
    if ctx.rank in (0, 2):
        smaller = dist.shrink_group([1], group=sub)
        ctx.equal(dist.get_process_group_ranks(smaller), [0, 2])
        check(ctx, smaller, [0, 2])
    dist.barrier()
    if ctx.rank == 3:
        return
    for left in ([0, 1, 2], [0, 1]):
        if ctx.rank not in left:
            return
        world = dist.shrink_group([len(left)])
        ctx.equal(dist.group.WORLD, world)
        ctx.equal((dist.get_rank(), dist.get_world_size()), (ctx.rank, len(left)))
        check(ctx, world, left)
        check(ctx, dist.new_group(left), left)
        objects: list[int | None] = [None] * len(left)
        dist.all_gather_object(objects, ctx.rank)
        ctx.equal(objects, left)


def test_shrink_group(reused, transport, backend):
    if backend == "gloo":
        pytest.skip("gloo cannot shrink")
    reused(4, transport).run_in_group(shrink)


def disagree(ctx: Ctx) -> str:
    """Each rank excludes a different one."""
    try:
        dist.shrink_group([(ctx.rank + 1) % ctx.size])
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def test_shrinking_differently(reused, transport, backend):
    if backend == "gloo":
        pytest.skip("gloo cannot shrink")
    texts = reused(3, transport).run_in_group(disagree, timeout=2.0)
    assert any("missing: " in text for text in texts), texts
    # The first rank that times out may leave before the others time out.
    ends = ("missing: ", "closed its connection")
    assert all("shrunk" in text and any(end in text for end in ends) for text in texts), texts


@pytest.mark.worlds(2, 3)
def test_destroyed_in_any_order(world):
    world.run(destroyed_in_any_order)


def alone(ctx: Ctx) -> None:
    """In a world of one, every operation is a copy or does nothing."""
    check(ctx, dist.group.WORLD, [0])
    x = arith.values(torch.float32, 100, 1)
    y = torch.zeros(100)
    for name, call in {
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(y, x),
        "all_to_all_single": lambda: dist.all_to_all_single(y, x),
        "gather": lambda: dist.gather(x, [y], dst=0),
        "scatter": lambda: dist.scatter(y, [x], src=0),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(y, x),
    }.items():
        with ctx.case(name):
            y.zero_()
            call()
            ctx.same(y, x)
    dist.reduce(y, 0)
    ctx.same(y, x)
    dist.monitored_barrier()


@pytest.mark.worlds(1)
def test_world_of_one(world):
    world.run(alone)


def test_exit_codes(fresh, transport):
    """Processes that destroy their group and return end with status 0."""
    world = fresh(3, transport)
    world.run(subsets)
    assert world.close() == [0, 0, 0]


def test_a_shrunk_group_keeps_the_backends_of_devices(monkeypatch) -> None:
    """torch shrinks the nccl part of cpu:mycoll,cuda:nccl, which must not get CPU tensors."""
    registered = []

    class Shrunk:
        _device_types = (torch.device("cuda"),)

        def _get_backend(self, device: torch.device) -> object:
            return object()  # the backend nccl

        def _register_backend(self, *registration: object) -> None:
            registered.append(registration)

    monkeypatch.setattr(_compat, "_backend_names", lambda _: {"cpu": "mycoll", "cuda": "nccl"})
    made = Shrunk()
    assert _compat._wrap_shrink_group(lambda *_: made)([1]) is made
    assert not registered
