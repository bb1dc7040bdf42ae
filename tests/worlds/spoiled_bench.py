"""python -m worlds.spoiled_bench WORDS: runs `mycoll bench` with ranks that change one element of
each result before they verify it; the verification must fail."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from mycoll.bench import collectives, main, pairwise


def spoil(tensor: torch.Tensor) -> None:
    """Changes one element."""
    if tensor.numel():
        raw = tensor.view(-1).view(torch.uint8)
        raw[raw.numel() // 2] ^= 1


def spoiled_target(real: Callable[..., int]) -> Callable[..., int]:
    def wrong(self: Any, target: torch.Tensor, pattern: Any) -> int:
        spoil(target)
        return real(self, target, pattern)

    return wrong


def spoiled_message(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, index: int, group: Any) -> Callable[[], None]:
        transfer = real(self, index, group)

        def both() -> None:
            transfer()
            spoil(self.incoming(index))

        return both

    return call


if __name__ == "__main__":
    whole: Any = collectives.CollectiveWorkload
    whole._wrong = spoiled_target(whole._wrong)
    for kind in pairwise.PAIRWISE.values():
        kind.call = spoiled_message(kind.call)  # type: ignore[method-assign]
    collectives.now = lambda: -time.perf_counter_ns()  # leaves a barrier before it enters
    sys.exit(main(sys.argv[1:]))
