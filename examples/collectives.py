"""Operations that all ranks of a group call, on tensors and on Python objects.

torchrun --nproc-per-node 2 examples/collectives.py
"""

import torch
import torch.distributed as dist


def tensors(rank: int, size: int) -> None:
    mine = torch.full((2,), float(rank + 1))
    total = float(sum(range(1, size + 1)))

    value = mine.clone()
    dist.all_reduce(value, op=dist.ReduceOp.SUM)  # every rank gets the sum
    assert value.tolist() == [total] * 2

    value = mine.clone()
    dist.reduce(value, dst=0, op=dist.ReduceOp.MAX)  # only rank 0 gets the maximum
    assert rank != 0 or value.tolist() == [size] * 2

    value = mine.clone()
    dist.broadcast(value, src=0)  # every rank gets the tensor of rank 0
    assert value.tolist() == [1, 1]

    everyone = [torch.empty(2) for _ in range(size)]
    dist.all_gather(everyone, mine)  # every rank gets all tensors
    assert [part[0].item() for part in everyone] == list(range(1, size + 1))

    gathered = [torch.empty(2) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, gathered, dst=0)  # only rank 0 gets all tensors

    part = torch.empty(2)
    dist.scatter(part, gathered, src=0)  # each rank gets one of rank 0's tensors
    assert torch.equal(part, mine)

    outgoing = [torch.tensor([10 * rank + to]) for to in range(size)]
    incoming = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_to_all(incoming, outgoing)  # each rank sends a tensor to each rank
    assert [part.item() for part in incoming] == [10 * source + rank for source in range(size)]

    summed = torch.empty(2)
    dist.reduce_scatter(
        summed, [mine.clone() for _ in range(size)]
    )  # each rank gets a part of the sum
    assert summed.tolist() == [total] * 2

    dist.barrier()  # no rank continues before all have arrived
    if rank == 0:
        print("tensors: all as expected")


def overlapped(rank: int, size: int) -> None:
    """async_op=True returns a Work. Compute while it runs, and call wait() before using the
    result."""
    values = [torch.full((1000,), float(rank)) for _ in range(4)]
    works = [dist.all_reduce(value, async_op=True) for value in values]
    for work in works:
        work.wait()
    assert all((value == sum(range(size))).all() for value in values)
    if rank == 0:
        print("overlapped: all as expected")


def subgroup(rank: int) -> None:
    """A group of some ranks; all ranks must call new_group."""
    only_zero = dist.new_group([0])
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=only_zero)
        print("subgroup: as expected")


def objects(rank: int, size: int) -> None:
    """Any object that can be pickled. Use it for settings and metrics; tensors are faster."""
    settings = [{"lr": 0.1, "name": "run 7"}] if rank == 0 else [None]
    dist.broadcast_object_list(settings, src=0)
    report: list[object] = [None] * size
    dist.all_gather_object(report, {"rank": rank, "lr": settings[0]["lr"]})
    if rank == 0:
        print(f"objects: {report}")


def main() -> None:
    dist.init_process_group("mycoll")
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors(rank, size)
    overlapped(rank, size)
    subgroup(rank)
    objects(rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
