"""Messages between two ranks: blocking, non-blocking, from any source, and in a batch.

torchrun --nproc-per-node 2 examples/point_to_point.py
"""

import torch
import torch.distributed as dist


def blocking(rank: int) -> None:
    """send() returns when the tensor may be changed again, recv() when it has been received."""
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
    print(f"blocking: rank {rank} has {tensor.item()}")


def non_blocking(rank: int) -> None:
    """isend() and irecv() return immediately. Do not touch the tensor until wait() has returned."""
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.isend(tensor, dst=1).wait()
    elif rank == 1:
        request = dist.irecv(tensor, src=0)
        # ... compute something else here ...
        request.wait()
    print(f"non-blocking: rank {rank} has {tensor.item()}")


def from_any_source(rank: int) -> None:
    """Without a source, recv() receives the first message of that tag, and returns its sender."""
    if rank == 0:
        tensor = torch.empty(2)
        for _ in range(dist.get_world_size() - 1):
            sender = dist.recv(tensor, tag=7)
            print(f"any source: rank {sender} sent {tensor.tolist()}")
    else:
        dist.send(torch.full((2,), float(rank)), dst=0, tag=7)


def neighbours(rank: int, size: int) -> None:
    """Each rank sends to its right neighbour and receives from its left one. The order of
    operations in a batch does not matter."""
    outgoing, incoming = torch.tensor([rank]), torch.empty(1, dtype=torch.int64)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, outgoing, (rank + 1) % size),
            dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
        ]
    )
    for request in requests:
        request.wait()
    assert incoming.item() == (rank - 1) % size
    print(f"neighbours: rank {rank} received from {incoming.item()}")


def main() -> None:
    dist.init_process_group("mycoll")
    rank, size = dist.get_rank(), dist.get_world_size()
    blocking(rank)
    non_blocking(rank)
    from_any_source(rank)
    neighbours(rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
