"""The training of `mycoll demo`, on one of its ranks.

Read it as an example, too: only the caller, which makes the group, knows which backend is used.
"""

from __future__ import annotations

import hashlib
import math
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mycoll._terminal import Progress
from mycoll._units import show_seconds

CLASSES = 3


def run_rank(backend: str, steps: int) -> None:
    """Trains on a rank of the group, and compares the weights of all ranks."""
    say(f"Training on {dist.get_world_size()} ranks over {backend}, torch {torch.__version__}\n")
    check_weights(train(steps))


def spirals(points: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on three intertwined spiral arms, and the arm of each."""
    random = torch.Generator().manual_seed(seed)
    radius = torch.rand(points, generator=random)
    arm = torch.randint(CLASSES, (points,), generator=random)
    noise = torch.randn(points, generator=random) * 0.15
    angle = 2 * math.pi * (arm / CLASSES + 2 * radius) + noise
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm


def train(steps: int) -> nn.Module:
    """Returns the trained model."""
    torch.manual_seed(0)  # DDP would broadcast rank 0's weights anyway
    layers: list[nn.Module] = []
    for inputs, outputs in [(2, 256), (256, 256), (256, 256)]:
        layers += [nn.Linear(inputs, outputs), nn.GELU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(256, CLASSES)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Each rank sees other data; only the gradients that DDP all-reduces make them agree.
    points, arms = spirals(20_000, seed=dist.get_rank() + 1)
    test_points, test_arms = spirals(2_000, seed=1000 + dist.get_rank())

    progress = Progress(dist.get_rank() == 0)
    start = time.perf_counter()
    for step in range(1, steps + 1):
        chosen = torch.randint(len(points), (256,))
        loss = nn.functional.cross_entropy(model(points[chosen]), arms[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (1, steps) or step % max(1, steps // 40) == 0:
            with torch.no_grad():
                right = (model.module(test_points).argmax(dim=1) == test_arms).float().mean()
            # Loss and accuracy of all ranks, in one small tensor.
            means = torch.stack([loss.detach(), right])
            dist.all_reduce(means)
            means /= dist.get_world_size()
            line = f"  step {step:5d}  loss {means[0]:.4f}  accuracy {means[1]:6.1%}"
            spent = time.perf_counter() - start
            line += f"  {step / spent:5.0f} steps/s"
            progress.show(f"{line}, about {show_seconds(spent / step * (steps - step))} left")
            if step in (1, steps) or step % max(1, steps // 10) == 0:
                progress.hide()
                say(line)
    return model


def check_weights(model: nn.Module) -> None:
    """All ranks must hold the same weights, to the last bit."""
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    digest = hashlib.sha256(weights).hexdigest()
    everyone = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, digest)
    if len(set(everyone)) > 1:
        raise SystemExit(f"rank {dist.get_rank()}: the ranks' weights differ")
    say(f"\nWeights of all ranks are identical to the bit (sha256 {digest[:16]}).\n")


def say(text: str) -> None:
    """Prints on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)
