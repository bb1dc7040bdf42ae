"""torch.ops.mycoll.all_reduce_add_rms_norm beside its parts: all_reduce, `+` and torch's rms_norm.

    ./dev python benchmarks/norm.py                 two ranks, 64 tokens x 4096, bfloat16

In turns, eight calls in a row each time, so that a call's own time counts and not how late the
other rank is. A ratio is that of one round; rank 0 prints the median and the quartiles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median, quantiles

import mycoll
import torch
import torch.distributed as dist
from torch.nn.functional import rms_norm

CALLS = 8
EPSILON = 1e-5


def measure(tokens: int, hidden: int, rounds: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    name = dist.group.WORLD.group_name
    ops = torch.ops.mycoll
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, residual = (torch.randn(tokens, hidden, generator=generator).bfloat16() for _ in range(2))
    weight = torch.ones(hidden, dtype=torch.bfloat16)

    def parts() -> torch.Tensor:
        return rms_norm(ops.all_reduce(x, name) + residual, (hidden,), weight, EPSILON)

    def fused() -> torch.Tensor:
        return ops.all_reduce_add_rms_norm(x, residual, weight, EPSILON, name)[0]

    torch.testing.assert_close(fused(), parts(), atol=0.1, rtol=0.05)
    calls: dict[str, Callable[[], torch.Tensor]] = {"parts": parts, "fused": fused}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(-3, rounds):
        for each in list(calls) if index % 2 else list(calls)[::-1]:
            dist.barrier()
            began = time.perf_counter_ns()
            for _ in range(CALLS):
                calls[each]()
            if index >= 0:
                times[each].append((time.perf_counter_ns() - began) / CALLS)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    times = mycoll.spawn(measure, 2, (options.tokens, options.hidden, options.rounds))[0]
    for name, taken in times.items():
        print(f"{name:6} {median(taken) / 1e3:8.1f} us")
    ratios = [fused / parts for fused, parts in zip(times["fused"], times["parts"], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    print(f"fused / parts: {median(ratios):.2f} [{low:.2f} {high:.2f}]")


if __name__ == "__main__":
    main()
