"""A world of `mycoll bench` with one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from mycoll.bench.world import World


@dataclass(frozen=True)
class Alone(World):
    """A world whose other ranks exist only in its sizes."""

    def barrier(self) -> None:
        pass

    def share(self, value: Any, source: int = 0) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]

    gather_all = gather


def alone(**changes: int) -> Alone:
    sizes = {"size": 1, "local_size": 1, "hosts": 1, "cache_bytes": 1 << 20, **changes}
    return Alone(rank=0, device=torch.device("cpu"), **sizes)
