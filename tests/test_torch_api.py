"""Less common parts of torch.distributed that programs and libraries use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from worlds.smoke import smoke
from worlds.training import compare, model, reference, train
from worlds.worker import Ctx

pytestmark = pytest.mark.transports("shm")


def names(ctx: Ctx) -> None:
    world = dist.group.WORLD
    ctx.equal(dist.get_backend(), ctx.backend)
    ctx.equal(dist.get_backend(world), ctx.backend)
    ctx.equal(dist.is_backend_available(ctx.backend), True)
    ctx.equal(ctx.backend in dist.Backend.backend_list, True)
    ctx.equal(dist.get_backend_config(), f"cpu:{ctx.backend},cuda:{ctx.backend}")
    ctx.equal(dist.get_node_local_rank(fallback_rank=7), 7)
    members = list(range(1, ctx.size))
    group = dist.new_group(members)
    if ctx.rank == 0:
        ctx.equal(group, dist.GroupMember.NON_GROUP_MEMBER)
        ctx.equal(dist.get_rank(group), -1)
        ctx.equal(dist.get_world_size(group), -1)
    else:
        ctx.equal(dist.get_rank(group), ctx.rank - 1)
        ctx.equal(dist.get_world_size(group), len(members))
        ctx.equal(dist.get_process_group_ranks(group), members)
        for at, rank in enumerate(members):
            ctx.equal(dist.get_group_rank(group, rank), at)
            ctx.equal(dist.get_global_rank(group, at), rank)
        with ctx.raises(ValueError, "not part"):
            dist.get_group_rank(group, 0)
        with ctx.raises(ValueError, "not part"):
            dist.get_global_rank(group, len(members))
        x = torch.ones(1)
        # Rank numbers of the group instead of global ones.
        dist.broadcast(x, group=group, group_src=0)
        dist.destroy_process_group(group)
    dist.barrier()
    # torch refuses device_ids of barrier() without an accelerator.
    dist.barrier(async_op=True).wait()


@pytest.mark.worlds(2, 3)
def test_names_and_ranks(world):
    world.run(names)


def debug(ctx: Ctx, level: str) -> None:
    ctx.equal(dist.get_debug_level(), getattr(dist.DebugLevel, level))
    smoke(ctx.rank, ctx.size)
    net = model()
    train(DistributedDataParallel(net), [ctx.rank])
    compare(ctx, net, reference(ctx))
    found = [None] * ctx.size
    dist.all_gather_object(found, {"rank": ctx.rank})
    ctx.equal([each["rank"] for each in found], list(range(ctx.size)))
    dist.all_reduce_coalesced([torch.ones(4)])
    dist.monitored_barrier()
    group = dist.new_group([0, 1])
    if ctx.rank < 2:
        smoke(ctx.rank, 2, group)
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        dist.monitored_barrier(group)
        work = dist.all_gather_into_tensor(torch.empty(6), x, group=group, async_op=True)
        work.wait()
        dist.destroy_process_group(group)


@pytest.mark.parametrize("level", ["OFF", "INFO", "DETAIL"])
def test_debug_levels(reused, transport, level):
    reused(3, transport, env=(("TORCH_DISTRIBUTED_DEBUG", level),)).run_in_group(debug, level)


def unused_is_named(ctx: Ctx) -> None:
    """DDP's error about an unused parameter, with the names that DETAIL adds."""
    net = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "forgotten": torch.nn.Linear(2, 2)})

    class Partly(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net["used"](x)

    wrapped = DistributedDataParallel(Partly())
    wrapped(torch.ones(1, 2)).sum().backward()
    with ctx.raises(RuntimeError, "find_unused_parameters", "forgotten"):
        wrapped(torch.ones(1, 2))


def test_unused_parameters_are_named(reused):
    reused(2, env=(("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),)).run_in_group(unused_is_named)


BREAKPOINT = """
import torch, torch.distributed as dist
dist.init_process_group({backend!r})
for _ in range(2):
    dist.breakpoint(rank=0, skip=1)
x = torch.ones(1)
dist.all_reduce(x)
print("after the breakpoint", int(x), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.tools
def test_breakpoint(backend, free_port):
    """Rank 0 stops in pdb and the others wait; `c` continues all of them."""
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BREAKPOINT.format(backend=backend)],
            env={**os.environ, **env, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [
            rank.communicate(input, timeout=90)[0]
            for rank, input in zip(ranks, ["c\n", ""], strict=True)
        ]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "(Pdb)" in outputs[0] or "ATTENTION" in outputs[0], outputs[0]
    assert all("after the breakpoint 2" in output for output in outputs), outputs
