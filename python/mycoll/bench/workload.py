"""Cases and workloads: what a row measures, and the interface of an operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mycoll.bench.world import World

Call = Callable[[], object]
# By operation: makes a call of its buffers.
Operators = Mapping[str, Callable[[Any], Call]]
Group = dist.ProcessGroup
PAIR = (0, 1)  # the ranks of operations between two


class Unsupported(Exception):
    """This contender cannot run this case; the message says why in one line."""


@dataclass(frozen=True)
class Case:
    op: str
    size: int
    dtype_name: str
    redop: str
    root: int

    @property
    def title(self) -> str:
        if self.op == "barrier":
            return self.op
        redop = "" if self.redop == "none" else f" {self.redop}"
        return f"{self.op} {self.size} B {self.dtype_name}{redop}"

    @property
    def dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype_name)
        assert isinstance(dtype, torch.dtype)
        return dtype


class Workload(ABC):
    """One case, bound to this rank's buffers; every contender runs it on the same ones.

    size          bytes, rounded to what the operation can divide
    count         elements as nccl-tests counts them
    messages      how many transfers one call makes: its time is divided by it
    bus_factor    algbw times this is busbw
    copied_bytes  what each rank would have to copy if memory were the only limit
    touched_bytes what one call reads and writes on this rank
    pairwise      only two ranks take part
    """

    size: int
    count: int
    messages: int = 1
    bus_factor: float = 1.0
    copied_bytes: float = 0.0
    touched_bytes: int = 0
    pairwise: bool = False

    def __init__(self, case: Case, world: World) -> None:
        self.case = case
        self.world = world

    @property
    def busy_ranks(self) -> int:
        """How many ranks of this host move data in a call."""
        return min(len(PAIR), self.world.local_size) if self.pairwise else self.world.local_size

    @abstractmethod
    def refill(self) -> None:
        """New data in every buffer, and none of it in cache."""

    @abstractmethod
    def calls(self, group: Group) -> Sequence[Call]:
        """One call for each set of buffers; empty on a rank that takes no part."""

    def with_operators(self, operators: Operators) -> Workload:
        """The same by these operators of torch, on the same buffers."""
        raise Unsupported("")

    @abstractmethod
    def verify(self, group: Group, seed: int, plant_error: bool) -> int:
        """Runs the operation once on telling data; the number of wrong elements on this rank."""
