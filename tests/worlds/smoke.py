"""A small job that calls every kind of operation; also a program for launchers:

python smoke.py BACKEND [LOCAL_RANKS_FROM_ENV]
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist


def smoke(rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
    """Raises if a result is wrong."""

    def same(got: torch.Tensor, want: torch.Tensor) -> None:
        if not torch.equal(got, want):
            raise AssertionError(f"rank {rank} got {got}, want {want}")

    ranks = torch.arange(size, dtype=torch.float32)
    for numel in (1, 5000, 400_000):
        x = torch.full((numel,), float(rank))
        dist.all_reduce(x, group=group)
        same(x, torch.full((numel,), float(ranks.sum())))
        y = torch.full((numel,), float(rank))
        work = dist.broadcast(y, size - 1, group=group, async_op=True)
        work.wait()
        same(y, torch.full((numel,), float(size - 1)))
    out = torch.zeros(size)
    dist.all_gather_into_tensor(out, torch.full((1,), float(rank)), group=group)
    same(out, ranks)
    dist.all_to_all_single(out, torch.full((size,), float(rank)), group=group)
    same(out, ranks)
    rows = [torch.zeros(3) for _ in range(size)]
    dist.gather(torch.full((3,), float(rank)), rows if rank == 0 else None, dst=0, group=group)
    if rank == 0:
        same(torch.stack(rows)[:, 2], ranks)
    dist.scatter(x := torch.zeros(3), rows if rank == 0 else None, src=0, group=group)
    same(x, torch.full((3,), float(rank)))
    dist.reduce(x, 0, group=group)
    if rank == 0:
        same(x, torch.full((3,), float(ranks.sum())))
    piece = torch.zeros(1)
    dist.reduce_scatter_tensor(piece, ranks.clone(), group=group)
    same(piece, torch.full((1,), float(rank * size)))
    if size > 1:
        work = dist.isend(torch.full((100,), float(rank)), (rank + 1) % size, group=group)
        got = torch.zeros(100)
        dist.recv(got, (rank - 1) % size, group=group)
        work.wait()
        same(got, torch.full((100,), float((rank - 1) % size)))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    if objects != [{"rank": r} for r in range(size)]:
        raise AssertionError(f"rank {rank} got {objects}")
    dist.barrier(group=group)


def spawned(rank: int, size: int, backend: str, url: str) -> None:
    """The entry point for torch.multiprocessing.spawn."""
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=size)
    smoke(rank, size)
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    backend = sys.argv[1]
    if backend == "spawn":
        import torch.multiprocessing as mp

        backend, url = sys.argv[2:4]
        mp.spawn(spawned, args=(2, backend, url), nprocs=2)
        print("smoke: ok spawn", flush=True)
        return
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    smoke(rank, size)
    dist.destroy_process_group()
    print(f"smoke: ok {rank} of {size} in {os.getpid()}", flush=True)


if __name__ == "__main__":
    main()
