"""DistributedDataParallel: each rank trains on a part of the data, and backward() averages
gradients.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    dist.init_process_group("mycoll")
    torch.manual_seed(0)
    inputs = torch.randn(1024, 8)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    sampler = DistributedSampler(data)  # a part for each rank, shuffled in each epoch
    loader = DataLoader(data, batch_size=32, sampler=sampler)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
