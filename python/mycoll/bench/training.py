"""Communication beside computing: one all_reduce hidden behind it, and a training step of DDP."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
from torch.nn import Linear, Module, Sequential
from torch.nn.parallel import DistributedDataParallel

from mycoll.bench.arena import Arena
from mycoll.bench.clock import time_calls
from mycoll.bench.collectives import CollectiveWorkload
from mycoll.bench.workload import Call, Case, Group, Workload
from mycoll.bench.world import World

_REPEATS = 10
_MATRIX = 64
_BATCH = 8
# Relative to the largest gradient; what the order of additions may change.
_GRADIENT_DISTANCE = 1e-4


class OverlapWorkload(CollectiveWorkload):
    """An asynchronous all_reduce, then computing, then wait().

    There is as much to compute as the run's own gloo group takes to communicate (on a device, a
    group of mycoll's): the same for every contender, so that their times can be compared.
    """

    def __init__(self, case: Case, world: World, hot: bool) -> None:
        super().__init__(Case("all_reduce", *_tail(case)), world, hot)
        self.case = case
        self.copied_bytes = 0.0
        self._matrices = torch.rand(3, _MATRIX, _MATRIX, device=world.device)
        self._products = 1
        # As many bytes, but of a dtype that gloo can reduce.
        floats = torch.ones(-(-self.size // 4), device=world.device)
        group = _yardstick(world.device.type)
        measured = partial(dist.all_reduce, floats, op=dist.ReduceOp.MAX, group=group)
        target = self._median_ns([measured])
        self._products = max(1, round(target / self._median_ns([self._compute])))
        self._products = world.share(self._products)

    def calls(self, group: Group) -> Sequence[Call]:
        compute = self._compute

        def overlapped(tensor: torch.Tensor) -> None:
            work = dist.all_reduce(tensor, group=group, async_op=True)
            compute()
            assert work is not None
            work.wait()

        return [
            partial(overlapped, self._buffers(index).source) for index in range(self._arena.windows)
        ]

    def extra(self, group: Group) -> dict[str, float]:
        """How much of the shorter of the two was hidden behind the other."""
        compute = self._median_ns([self._compute])
        alone = self._median_ns(list(super().calls(group))[:_REPEATS])
        both = self._median_ns(list(self.calls(group))[:_REPEATS])
        hidden = 100 * (compute + alone - both) / max(1.0, min(compute, alone))
        return {
            "compute_us": compute / 1e3,
            "communication_us": alone / 1e3,
            "hidden_percent": max(0.0, min(100.0, hidden)),
        }

    def _compute(self) -> None:
        left, right, product = self._matrices
        for _ in range(self._products):
            torch.mm(left, right, out=product)

    def _median_ns(self, calls: list[Call]) -> float:
        """On all ranks the slowest rank's median."""
        schedule = (calls * _REPEATS)[:_REPEATS]
        self.world.barrier()
        mine = median(time_calls(schedule, self.world.device, None))
        return max(self.world.gather_all(mine))


@cache
def _yardstick(device_type: str) -> Group | None:
    """One for the run, which ends with it. The run's own group is gloo's, which has no devices."""
    if device_type == "cpu":
        return None
    group = dist.new_group(backend="mycoll")
    assert isinstance(group, Group)
    return group


def _tail(case: Case) -> tuple[int, str, str, int, bool]:
    return case.size, case.dtype_name, case.redop, case.root, case.in_place


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
