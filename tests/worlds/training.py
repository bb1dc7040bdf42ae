"""A small model, its data, and checks of its distributed training.

The result is compared with that of one process that trains on all ranks' batches, or with that of a
gloo group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from worlds import arith
from worlds.worker import Ctx

STEPS = 4


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 40), nn.Linear(40, 1))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = arith.values(torch.float32, (16, 20), 1000 * step + rank).clamp(-3, 3)
    return x, x.sum(1, keepdim=True)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def train(
    net: nn.Module,
    ranks: Sequence[int],
    optimizer: torch.optim.Optimizer | None = None,
    steps: Iterable[int] = range(STEPS),
) -> None:
    """Trains on the batches of these ranks: a rank's own, or all of them for the reference."""
    optimizer = optimizer or sgd(net)
    for step in steps:
        optimizer.zero_grad()
        parts = [nn.functional.mse_loss(net(x), y) for x, y in (batch(step, r) for r in ranks)]
        (sum(parts) / len(parts)).backward()
        optimizer.step()


def reference(ctx: Ctx) -> nn.Sequential:
    """The model that one process trains on all ranks' batches."""
    net = model()
    train(net, list(range(ctx.size)))
    return net


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def close(
    ctx: Ctx, got: torch.Tensor, want: torch.Tensor, what: str = "", tolerance: float = 1e-5
) -> None:
    got, want = full(got), full(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        ctx.fail(f"{what} {got.dtype}{tuple(got.shape)}, want {want.dtype}{tuple(want.shape)}")
    elif not torch.allclose(got, want, rtol=tolerance, atol=tolerance):
        ctx.fail(f"{what} is off by {(got - want).abs().max()}")


def compare(ctx: Ctx, net: nn.Module, wanted: nn.Module, tolerance: float = 1e-5) -> None:
    pairs = zip(net.named_parameters(), wanted.parameters(), strict=True)
    for (name, got), want in pairs:
        close(ctx, got, want, name, tolerance)
        ctx.digest(full(got))


# The process ends if one of gloo's own threads drops the last reference to a group, as callbacks of
# hooks may: the group's destructor joins that thread.
_gloo_groups = []


@contextlib.contextmanager
def gloo_group() -> Iterator[dist.ProcessGroup]:
    group = dist.new_group(backend="gloo")
    _gloo_groups.append(group)
    yield group
    dist.destroy_process_group(group)


def beside_gloo(
    ctx: Ctx,
    job: Callable[[dist.ProcessGroup], Sequence[torch.Tensor]],
    tolerance: float = 1e-5,
) -> None:
    """Runs the job in a new group of the tested backend and in one of gloo, and compares
    results."""
    group = dist.new_group()
    got = [full(t).clone() for t in job(group)]
    dist.destroy_process_group(group)
    with gloo_group() as other:
        want = [full(t).clone() for t in job(other)]
    ctx.equal(len(got), len(want), "number of results")
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        close(ctx, a, b, f"result {i}", tolerance)
        ctx.digest(a)
