"""A model that is split over devices, inside DistributedDataParallel.

Each rank splits its copy of the model over two devices. DDP without device_ids averages the
gradients of all copies. On a machine without accelerators both devices are the CPU.

torchrun --nproc-per-node 2 examples/model_parallel.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoHalves(nn.Module):
    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.devices = first, second
        self.first = nn.Linear(8, 32).to(first)
        self.second = nn.Linear(32, 1).to(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x.to(self.devices[0])))
        return self.second(hidden.to(self.devices[1]))


def my_devices() -> tuple[torch.device, torch.device]:
    """Two accelerators for each rank if there are enough, otherwise the CPU twice."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= 2 * int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cuda", 2 * local_rank), torch.device("cuda", 2 * local_rank + 1)
    return torch.device("cpu"), torch.device("cpu")


def main() -> None:
    # CUDA tensors use nccl, and all others mycoll.
    devices = my_devices()
    on_cpu = devices[0].type == "cpu"
    dist.init_process_group("mycoll" if on_cpu else "cpu:mycoll,cuda:nccl")
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoHalves(*devices))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = torch.zeros(())
    for step in range(50):
        random = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(64, 8, generator=random)
        y = x.sum(dim=1, keepdim=True).to(devices[1])
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    # The copies have stayed equal.
    weights = [p.detach().cpu().double().sum().item() for p in model.parameters()]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, weights)
    assert all(each == weights for each in everyone)
    if dist.get_rank() == 0:
        print(f"model parallel in DDP: loss {loss.item():.4f}, equal on all ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
