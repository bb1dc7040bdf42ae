"""Every operation on device tensors: the jobs of the CPU tests, with their tensors on a device.

Some jobs get copies of their tensors on the device (`mirrored`) and compute the expected results on
the CPU. Others make their tensors on the default device (`native`).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from jobs import (
    barriers,
    coalesced,
    functional,
    groups,
    layouts,
    messages,
    moves,
    objects,
    reductions,
    walk,
    work,
)
from jobs.on_device import mirrored, native
from torch.distributed.distributed_c10d import _coalescing_manager
from worlds.worker import Ctx

MIRRORED = (
    *moves.JOBS,
    reductions.all_reduce_cases,
    reductions.all_reduce_big,
    reductions.nan_cases,
    reductions.reduce_cases,
    reductions.reduce_scatter_cases,
    reductions.reduce_scatter_uneven,
    reductions.reduce_scatter_big,
    layouts.strided_tensors_of_scatter_and_gather,
)

NATIVE = (
    barriers.barriers,
    functional.functional,
    functional.gradients,
    groups.subsets,
    layouts.expanded_everywhere,
    objects.objects,
    messages.batch,
    messages.batch_one_sided,
    messages.to_oneself,
    work.freed_at_once,
    work.other_orders,
    work.wait_with_enough_time,
)

# NCCL does not support tags, any source, messages that both ranks of a pair send before they
# receive, and the engine's arithmetic.
HOST_ONLY_MIRRORED = (layouts.layouts,)
HOST_ONLY = (
    layouts.degenerate,
    messages.beside_collectives,
    work.dropped,
    messages.any_source,
    messages.order_kept,
    messages.ping_pong,
    messages.tags_out_of_order,
    reductions.integer_average,
)


def named(job) -> str:
    return f"{job.__module__.removeprefix('jobs.')}.{job.__name__}"


@pytest.mark.parametrize("job", MIRRORED, ids=named)
@pytest.mark.worlds(3)
def test_mirrored(device_world, job):
    device_world.run(mirrored, job.__module__, job.__name__)


# The host path copies and calls the engine, which has its own tests; its copies do not depend on
# the number of ranks.
@pytest.mark.parametrize("job", MIRRORED[: len(moves.JOBS) + 2], ids=named)
@pytest.mark.worlds(1, 2, paths=["nccl"])
def test_mirrored_in_small_worlds(device_world, job):
    device_world.run(mirrored, job.__module__, job.__name__)


@pytest.mark.worlds(3, paths=["host"])
def test_ring(device_world):
    """Over NCCL a ring needs a batch, as with torch's nccl: the first message of a pair waits for
    both ranks."""
    device_world.run(mirrored, "jobs.messages", messages.ring.__name__)


@pytest.mark.parametrize("job", NATIVE, ids=named)
@pytest.mark.worlds(3)
def test_native(device_world, job):
    device_world.run(native, job.__module__, job.__name__)


@pytest.mark.parametrize("path", ["nccl", "host"])
def test_groups_are_destroyed_in_any_order(fresh_device_world, path):
    """A rank waits for the others, which destroy another group. Then it continues, and its thread
    remains in NCCL until they destroy this group, too."""
    env = (("STANDIN_NCCL", "one_thread=0"),)
    job = groups.destroyed_in_any_order
    fresh_device_world(3, path, env=env).run(native, job.__module__, job.__name__)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.worlds(3)
def test_coalesced_calls(device_world, mode):
    device_world.run(native, "jobs.coalesced", coalesced.coalesced_calls.__name__, mode)


@pytest.mark.worlds(2)
def test_an_exception_in_a_block(device_world):
    device_world.run(native, "jobs.coalesced", coalesced.after_a_broken_block.__name__)


@pytest.mark.worlds(2)
def test_blocks_of_two_threads(device_world):
    device_world.run(native, "jobs.coalesced", coalesced.nested_blocks.__name__)
    device_world.run(native, "jobs.coalesced", coalesced.blocks_of_two_threads.__name__)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.worlds(3)
def test_coalescing_manager(device_world, mode):
    device_world.run(native, "jobs.coalesced", coalesced.manager.__name__, mode)


def shared_memory(ctx: Ctx) -> None:
    """Outputs that overlap inputs, on one rank only."""
    n, rank, where = ctx.size, ctx.rank, ctx.device

    def values(of: int) -> torch.Tensor:
        return torch.arange(4.0 * n) + 100 * of

    all_values = [values(of) for of in range(n)]
    with ctx.case("reduce_scatter_tensor into its own input"):
        whole = values(rank).to(where)
        part = whole[:4] if rank == n - 1 else torch.empty(4, device=where)
        dist.reduce_scatter_tensor(part, whole)
        ctx.same(part.cpu(), sum(all_values)[4 * rank : 4 * rank + 4])
    with ctx.case("all_to_all_single in place"):
        whole = values(rank).to(where)
        result = whole if rank == 0 else torch.empty_like(whole)
        dist.all_to_all_single(result, whole)
        ctx.same(result.cpu(), torch.cat([v[4 * rank : 4 * rank + 4] for v in all_values]))
    with ctx.case("all_gather of one of its outputs, but not this rank's"):
        outputs = [torch.empty(4 * n, device=where) for _ in range(n)]
        mine = outputs[(rank + 1) % n] if rank == 0 else torch.empty(4 * n, device=where)
        mine.copy_(values(rank))
        dist.all_gather(outputs, mine)
        for output, want in zip(outputs, all_values, strict=True):
            ctx.same(output.cpu(), want)


def even_and_uneven(ctx: Ctx) -> None:
    """Two tensors of each rank, one of which has a different size on each rank."""
    n = ctx.size
    outputs = [[torch.zeros(2, device=ctx.device), torch.zeros(1 + of, device=ctx.device)]
               for of in range(n)]  # fmt: skip
    inputs = [torch.full_like(tensor, ctx.rank + 1) for tensor in outputs[ctx.rank]]
    dist.all_gather_coalesced(outputs, inputs)
    for of, (even, uneven) in enumerate(outputs):
        ctx.same(even.cpu(), torch.full((2,), of + 1.0))
        ctx.same(uneven.cpu(), torch.full((1 + of,), of + 1.0))


def messages_and_collectives(ctx: Ctx) -> None:
    """One batch with messages, which differ between ranks, and a collective."""
    n, rank = ctx.size, ctx.rank
    x, y, z = (torch.full((100,), float(rank), device=ctx.device) for _ in range(3))
    with _coalescing_manager(device=ctx.device):
        dist.isend(x, (rank + 1) % n)
        dist.irecv(y, (rank - 1) % n)
        dist.broadcast(z, 1)
    ctx.same(y.cpu(), torch.full((100,), float((rank - 1) % n)))
    ctx.same(z.cpu(), torch.full((100,), 1.0))


def splits_on_one_rank(ctx: Ctx) -> None:
    """Equal parts, which only one rank describes."""
    n = ctx.size
    splits = [2] * n if ctx.rank == 0 else None
    x = torch.arange(2 * n, device=ctx.device) + 100 * ctx.rank
    y = torch.zeros_like(x)
    dist.all_to_all_single(y, x, splits, splits)
    ctx.same(y.cpu(), torch.cat([torch.arange(2) + 2 * ctx.rank + 100 * of for of in range(n)]))


@pytest.mark.parametrize(
    "job",
    [shared_memory, even_and_uneven, messages_and_collectives, splits_on_one_rank],
    ids=named,
)
@pytest.mark.worlds(3)
def test_unusual_arguments(device_world, job):
    device_world.run(job)


@pytest.mark.parametrize("job", HOST_ONLY_MIRRORED, ids=named)
@pytest.mark.worlds(3, paths=["host"])
def test_host_path_mirrored(device_world, job):
    device_world.run(mirrored, job.__module__, job.__name__)


@pytest.mark.parametrize("job", HOST_ONLY, ids=named)
@pytest.mark.worlds(2, paths=["host"])
def test_host_path(device_world, job):
    device_world.run(native, job.__module__, job.__name__)


@pytest.mark.parametrize("job", [reductions.premul_cases], ids=named)
@pytest.mark.worlds(2)
def test_premul_sum(device_world, job):
    device_world.run(native, job.__module__, job.__name__)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.worlds(3, paths=["host"])
def test_random_walk_on_device(device_world, seed):
    device_world.run(native, "jobs.walk", walk.walk.__name__, seed)
