"""Models that are split over ranks: FSDP2 (fully_shard), and tensor parallelism.

torchrun --nproc-per-node 2 examples/sharded.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def train(model: nn.Module, data: torch.Tensor, steps: int = 5) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(data) - 1).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def shard_parameters(mesh: DeviceMesh, data: torch.Tensor) -> float:
    """FSDP2: each rank keeps a part of every parameter, and gathers those of a block on use."""
    model = make_model()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # The part of the batch for this rank. FSDP2 averages the gradients.
    part = data.tensor_split(mesh.size())[mesh.get_local_rank()]
    mean = torch.tensor(train(model, part))
    dist.all_reduce(mean)
    return mean.item() / mesh.size()


def shard_layers(mesh: DeviceMesh, data: torch.Tensor) -> float:
    """Tensor parallelism: each rank computes a part of every layer, for the whole batch."""
    model = make_model()
    for block in model:
        # Columns of the first layer and rows of the second: one all-reduce for both.
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return train(model, data)


def main() -> None:
    dist.init_process_group("mycoll")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    data = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    losses = {
        "one process": train(make_model(), data),
        "FSDP2": shard_parameters(mesh, data),
        "tensor parallel": shard_layers(mesh, data),
    }
    if dist.get_rank() == 0:
        print(losses)
    assert max(losses.values()) - min(losses.values()) < 1e-4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
