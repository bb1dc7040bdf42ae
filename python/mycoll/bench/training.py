"""A training step of DDP."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch.nn import Linear, Module, Sequential
from torch.nn.parallel import DistributedDataParallel

from mycoll.bench.arena import Arena
from mycoll.bench.workload import Call, Case, Group, Workload
from mycoll.bench.world import World

_BATCH = 8
# Relative to the largest gradient; what the order of additions may change.
_GRADIENT_DISTANCE = 1e-4


def _layers(widths: Sequence[int]) -> Module:
    torch.manual_seed(0)
    model = Sequential(*(Linear(*pair) for pair in pairwise(widths)))
    for layer in model:
        # Otherwise fifty layers would shrink gradients to nothing, and nothing could be verified.
        torch.nn.init.orthogonal_(layer.weight)  # type: ignore[arg-type]
    return model


def models() -> dict[str, tuple[Module, float]]:
    """Models and their DDP buckets in MiB: 100 small parameters; small and a few large ones."""
    return {
        "small": (_layers([32] * 51), 1 / 64),
        "mixed": (_layers([64] * 25 + [1024] * 4 + [64]), 1 / 16),
    }


class DdpWorkload(Workload):
    """A step: forward, backward with DDP's asynchronous all_reduces, no optimizer."""

    def __init__(self, case: Case, world: World, name: str) -> None:
        super().__init__(case, world)
        model, self._bucket_mib = models()[name]
        self._model = model.to(world.device)
        parameters = list(self._model.parameters())
        self.count = len(parameters)
        self.size = sum(p.numel() * p.element_size() for p in parameters)
        self._evictor = Arena(1, world, False, self.busy_ranks)
        self._replicas: dict[Group, DistributedDataParallel] = {}

    def refill(self) -> None:
        self._evictor.refill(torch.uint8)

    def calls(self, group: Group) -> Sequence[Call]:
        return [partial(self._step, self._replica(group), self._input(self.world.rank, 0))]

    def verify(self, group: Group, seed: int, plant_error: bool) -> int:
        replica = self._replica(group)
        self._step(replica, self._input(self.world.rank, seed))
        found = [parameter.grad for parameter in replica.parameters()]
        expected = [torch.zeros_like(parameter) for parameter in self._model.parameters()]
        for rank in range(self.world.size):
            self._step(self._model, self._input(rank, seed))
            for total, parameter in zip(expected, self._model.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad / self.world.size
        wrong = 0
        for gradient, right in zip(found, expected, strict=True):
            assert gradient is not None
            if plant_error:
                gradient.view(-1)[0] += right.abs().max() + 1
            allowed = _GRADIENT_DISTANCE * right.abs().max()
            wrong += int((~((gradient - right).abs() <= allowed)).sum())
        return wrong

    def _replica(self, group: Group) -> DistributedDataParallel:
        if group not in self._replicas:
            self._replicas[group] = DistributedDataParallel(
                copy.deepcopy(self._model), process_group=group, bucket_cap_mb=self._bucket_mib
            )
        return self._replicas[group]

    def _input(self, rank: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        width = next(self._model.parameters()).shape[1]
        return torch.randn(_BATCH, width, generator=generator).to(self.world.device)

    @staticmethod
    def _step(model: Module, batch: torch.Tensor) -> None:
        model.zero_grad(set_to_none=True)
        model(batch).square().mean().backward()
