"""The training task of the programs in this folder, and the check of its result."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

STEPS, BATCH, RATE = 6, 8, 0.05


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))


def data(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(BATCH, 10, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, x.sum(1, keepdim=True)


def reference(ranks: int) -> nn.Module:
    """Trains in one process with the batches of all ranks."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            x, y = data(rank, step)
            (nn.functional.mse_loss(net(x), y) / ranks).backward()
        optimizer.step()
    return net


def check(net: nn.Module) -> None:
    """Checks that the model was trained over mycoll to the weights of reference()."""
    assert dist.get_backend() == "mycoll", dist.get_backend()
    assert dist.get_world_size() == 2
    wanted = reference(dist.get_world_size())
    for got, want in zip(net.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-4, atol=1e-5)


def passed(name: str, version: str) -> None:
    if dist.get_rank() == 0:
        print(f"client: {name} {version}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
