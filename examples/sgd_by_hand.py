"""Data-parallel training by hand: each rank has a part of the data, and a ring averages gradients.

Two rings of messages show how an all-reduce can work: that of torch's tutorial, which sends whole
tensors, and one that sends chunks. In a program, use dist.all_reduce.

torchrun --nproc-per-node 2 examples/sgd_by_hand.py
"""

import torch
import torch.distributed as dist
from torch import nn


def whole_ring_all_reduce(tensor: torch.Tensor) -> None:
    """Sums in place. Each rank sends n - 1 tensors: it forwards the ones that it received."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    outgoing, incoming = tensor.clone(), torch.empty_like(tensor)
    for _ in range(size - 1):
        sending = dist.isend(outgoing, right)
        dist.recv(incoming, left)
        sending.wait()
        tensor += incoming
        outgoing, incoming = incoming, outgoing


def chunked_ring_all_reduce(tensor: torch.Tensor) -> None:
    """Sums in place. Each rank sends 2 (n - 1) / n of the tensor."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    # One chunk for each rank. The chunks are views, and may be unequal.
    chunks = list(tensor.view(-1).tensor_split(size))

    def forward(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        sending = dist.isend(outgoing, right)
        dist.recv(incoming, left)
        sending.wait()

    # First round: each rank adds its part to a chunk. After the last rank the chunk is complete.
    for step in range(size - 1):
        mine, theirs = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        arrived = torch.empty_like(theirs)
        forward(mine, arrived)
        theirs += arrived
    # Second round: the complete chunks go to all ranks.
    for step in range(size - 1):
        forward(chunks[(rank + 1 - step) % size], chunks[(rank - step) % size])


WAYS = {
    "ring": whole_ring_all_reduce,
    "chunked ring": chunked_ring_all_reduce,
    "all_reduce": dist.all_reduce,
}


def average_gradients(model: nn.Module, way: str) -> None:
    for parameter in model.parameters():
        WAYS[way](parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(way: str, steps: int = 100) -> float:
    torch.manual_seed(1234)  # the same weights everywhere
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    data = torch.randn(512, 8)
    target = data.pow(2).sum(dim=1, keepdim=True) / 8
    # The part of this rank. With unequal parts the average would need weights.
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data[mine]), target[mine])
        loss.backward()
        average_gradients(model, way)
        optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main() -> None:
    dist.init_process_group("mycoll")
    torch.set_num_threads(1)
    values = torch.arange(1003.0) * (dist.get_rank() + 1)
    results = []
    for all_reduce in WAYS.values():
        results.append(values.clone())
        all_reduce(results[-1])
    assert all(torch.equal(result, results[-1]) for result in results)

    losses = {way: train(way) for way in WAYS}
    if dist.get_rank() == 0:
        print(f"loss after training: {losses}")
    assert max(losses.values()) - min(losses.values()) < 1e-3
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
