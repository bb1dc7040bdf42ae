"""all_reduce of sparse COO tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from worlds.worker import Ctx, called


def sparse(rank: int, nnz: int, shape: tuple[int, ...], sparse_dim: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(rank * 17 + nnz)
    index = torch.stack([torch.randint(0, n, (nnz,), generator=g) for n in shape[:sparse_dim]])
    values = torch.randint(-50, 50, (nnz, *shape[sparse_dim:]), generator=g).to(torch.float64)
    return torch.sparse_coo_tensor(index, values, shape, check_invariants=True)


def sparse_sums(ctx: Ctx) -> None:
    for nnz, shape, sparse_dim in (
        (5, (100,), 1),
        (40, (30, 20), 2),
        (7, (50, 8), 1),
        (300, (1000, 16), 1),
        (0, (10, 3), 1),
    ):
        for mode in ("sync", "async"):
            with ctx.case(f"nnz {nnz} of {shape}, {mode}"):
                # Ranks hold different numbers of entries, with repeated indices.
                parts = [sparse(r, nnz + r, shape, sparse_dim) for r in range(ctx.size)]
                x = parts[ctx.rank].clone()
                called(mode, dist.all_reduce, x)
                ctx.equal(x.is_sparse, True)
                want = sum(p.to_dense() for p in parts)
                ctx.same(x.to_dense(), want)


@pytest.mark.worlds(1, 2, 4)
def test_sparse_all_reduce(world):
    world.run(sparse_sums)


def test_without_memory_for_the_sum() -> None:
    """The operation fails, and the process continues."""
    program = """
import resource, torch, torch.distributed as dist, mycoll
group = mycoll.process_group(dist.HashStore(), 0, 1)
x = torch.sparse_coo_tensor([[0]], torch.ones(1, 1 << 26), (4, 1 << 26)).coalesce()
group.allreduce([torch.sparse_coo_tensor([[0]], [1.0], (4,))]).wait()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), resource.RLIM_INFINITY))
try:
    group.allreduce([x]).wait()
except RuntimeError as error:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    print(error)
y = torch.ones(1)
mycoll.process_group(dist.HashStore(), 0, 1).allreduce([y]).wait()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "adding up sparse tensors failed" in ended.stdout


def sparse_refused(ctx: Ctx) -> None:
    x = sparse(ctx.rank, 4, (10,), 1)
    with ctx.raises((RuntimeError, ValueError, TypeError)):
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
    with ctx.raises((RuntimeError, ValueError, TypeError)):  # torch cannot add such tensors
        values = torch.ones(1, dtype=torch.uint16)
        dist.all_reduce(torch.sparse_coo_tensor(torch.tensor([[ctx.rank]]), values, (10,)))
    y = torch.ones(1)
    dist.all_reduce(y)
    ctx.equal(y.item(), ctx.size)


@pytest.mark.worlds(2)
def test_sparse_refuses_other_ops(world):
    world.run(sparse_refused)
