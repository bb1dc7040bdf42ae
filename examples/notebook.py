"""Without torchrun: mycoll.spawn starts the ranks and returns their results.

python examples/notebook.py

The same works in a notebook cell, with the package cloudpickle and without the last line's guard.
"""

import mycoll
import torch
import torch.distributed as dist


def estimate_pi(points: int) -> float:
    random = torch.Generator().manual_seed(dist.get_rank())
    hits = (torch.rand(points, 2, generator=random).norm(dim=1) < 1).sum()
    dist.all_reduce(hits)
    return 4 * hits.item() / points / dist.get_world_size()


if __name__ == "__main__":
    print(mycoll.spawn(estimate_pi, nprocs=2, args=(1_000_000,)))
