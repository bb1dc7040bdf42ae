"""Device tensors over mycoll and over torch's own nccl backend, in the same processes."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worlds import arith, device
from worlds.worker import Ctx

from gpu import results

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU that torch can use: ./dev gpu runs these"
)

NUMELS = (1, 1000, 1 << 20)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def compare(ctx: Ctx) -> None:
    rival = dist.new_group(backend="nccl")
    ours = dist.new_group()
    for dtype in DTYPES:
        for numel in NUMELS:
            # Small integers: sums are exact in any order, and do not overflow.
            mine = (torch.arange(numel) % 3 + ctx.rank % 2).to(dtype).to(ctx.device)
            for name in results.OPERATIONS:
                if name.endswith("AVG") and not dtype.is_floating_point:
                    continue
                for mode in ("sync", "async"):
                    with ctx.case(f"{name}/{arith.short(dtype)}/{numel}/{mode}"):
                        want = results.run(name, mode, mine, rival)
                        torch.cuda.synchronize()  # two communicators must not run concurrently
                        got = results.run(name, mode, mine, ours)
                        for a, b in zip(got, want, strict=True):
                            ctx.same(a, b.cpu(), "against nccl:")
                        torch.cuda.synchronize()


@pytest.mark.worlds(1, 2, 4, paths=["nccl"])
def test_results(device_world):
    device_world.run(compare, deadline=240)


def full_world(ctx: Ctx) -> None:
    for numel in (1, 1000, 10_000_000):
        x = torch.full((numel,), float(ctx.rank + 1), device=ctx.device)
        dist.all_reduce(x)
        ctx.same(x, torch.full((numel,), float(sum(range(1, ctx.size + 1)))))


def test_as_many_ranks_as_gpus(pool):
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("one GPU")
    spec = pool.spec(count, device="cuda", path="nccl")
    pool.get(spec).run(full_world)


COPIES = """
import torch
print(*{line.split()[-1] for line in open("/proc/self/maps") if "libnccl" in line})
"""


def test_nccl_is_torchs_own(pool):
    """mycoll loads no copy of NCCL besides the one that torch loads."""
    alone = subprocess.run(
        [sys.executable, "-c", COPIES], capture_output=True, text=True, check=True
    )
    world = pool.get(pool.spec(1, device="cuda", path="nccl"))
    assert world.run(loaded_copies)[0] == set(alone.stdout.split())


def loaded_copies(ctx: Ctx) -> set[str]:
    dist.all_reduce(torch.ones(1, device=ctx.device))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in maps if "libnccl" in line}


def mixed_worlds(ctx: Ctx, backend: str) -> None:
    """Groups of a process that is bound to its GPU. torch then splits groups if possible."""
    ctx.init(backend=backend, device_id=ctx.device)
    mesh = dist.device_mesh.init_device_mesh("cuda", (ctx.size, 1), mesh_dim_names=("dp", "tp"))
    groups = [dist.group.WORLD, mesh["dp"].get_group(), dist.new_group(backend="nccl")]
    groups.append(dist.new_group(backend="mycoll"))
    for group in groups:
        x = torch.full((5,), float(ctx.rank + 1), device=ctx.device)
        dist.all_reduce(x, group=group)
        ctx.same(x.cpu(), torch.full((5,), float(sum(range(1, ctx.size + 1)))))
    for group in (groups[0], groups[3]):
        x = torch.ones(5)
        dist.all_reduce(x, group=group)
        ctx.same(x, torch.full((5,), float(ctx.size)))
    dist.destroy_process_group()


@pytest.mark.parametrize("whole", ["mycoll", "cpu:mycoll,cuda:nccl"])
def test_worlds_of_both(fresh_device_world, whole):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    fresh_device_world(2, "nccl", init=False).run(mixed_worlds, whole)


def foreign_options(ctx: Ctx) -> None:
    theirs = dist.ProcessGroupNCCL.Options()
    theirs.config.max_ctas = 4
    theirs.config.blocking = 1
    theirs._timeout = timedelta(seconds=77)
    group = dist.new_group(backend="mycoll", pg_options=theirs)
    ours = group._get_backend(ctx.device).options
    ctx.equal((ours.nccl.max_ctas, ours.nccl.is_blocking), (4, True))
    ctx.equal((ours.nccl.min_ctas, ours.nccl.net_name), (None, ""))
    dist.destroy_process_group(group)


@pytest.mark.worlds(1, paths=["nccl"])
def test_options_of_torchs_nccl(device_world):
    device_world.run(foreign_options)


def test_paths_are_known() -> None:
    assert set(device.paths("cuda", 1, ["nccl"])) == {"nccl"}
