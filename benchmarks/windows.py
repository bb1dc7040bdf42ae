"""Measures a put into another rank's window, beside one copy of the same bytes, and the time until
a rank can read the first byte of another rank's large tensor.

    ./dev python benchmarks/windows.py                  two ranks of this host, 64 MiB
    ./dev python benchmarks/windows.py --bytes 4096 --rounds 2000

Rank 0 measures, in alternating order, a put into rank 1's shared tensor, and torch's copy_() and
the engine's own copy into a tensor of its own process. Each call reads another source, so that none
is in the caches. A ratio is the time of the copy over that of the put in the same round. The
program prints the median of the ratios, and the range of the middle 90 %: above 1.0 the put is
faster than the copy. Rank 1 sleeps meanwhile, outside of all calls.

Then each rank registers a tensor of --mapped bytes, and rank 0 maps that of rank 1 and reads its
first element, once for each window.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median, quantiles

import mycoll
import torch
import torch.distributed as dist
from mycoll._native import native

SOURCES = 4


def measure(nbytes: int, rounds: int) -> dict[str, list[int]]:
    target = mycoll.zeros(nbytes, dtype=torch.uint8)
    window = mycoll.new_window(target)
    here = mycoll.zeros(nbytes, dtype=torch.uint8)
    times: dict[str, list[int]] = {}
    if dist.get_rank() == 0:
        sources = [torch.full((nbytes,), i, dtype=torch.uint8) for i in range(SOURCES)]
        module = native()
        calls: dict[str, Callable[[torch.Tensor], object]] = {
            "put": lambda source: window.put(source, 1, 0, False),
            "copy_": here.copy_,
            "engine's copy": lambda source: module.copy_streaming(
                here.data_ptr(), source.data_ptr(), nbytes
            ),
        }
        times = {name: [] for name in calls}
        torch.set_num_threads(1)  # a copy by one core
        for index in range(-3, rounds):
            names = list(calls) if index % 2 else list(calls)[::-1]
            for at, name in enumerate(names):
                source = sources[(index + at) % SOURCES]
                began = time.perf_counter_ns()
                calls[name](source)
                took = time.perf_counter_ns() - began
                if index >= 0:  # earlier calls touch pages for the first time
                    times[name].append(took)
        window.signal(1, False)
    else:
        window.wait_signal(0, True).wait()
    window.tensor_deregister()
    return times


def first_bytes(nbytes: int, windows: int = 5) -> list[int]:
    times = []
    for number in range(windows):
        tensor = mycoll.empty(nbytes, dtype=torch.uint8)
        tensor[0] = number + 1
        window = mycoll.new_window(tensor)
        began = time.perf_counter_ns()
        if dist.get_rank() == 0:
            assert window.map_remote_tensor(1)[0].item() == number + 1
        times.append(time.perf_counter_ns() - began)
        window.tensor_deregister()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--mapped", type=int, default=1 << 30)
    options = parser.parse_args()
    times = mycoll.spawn(measure, 2, (options.bytes, options.rounds))[0]
    for name, taken in times.items():
        rate = options.bytes / median(taken)
        print(f"{name:14}  {median(taken) / 1e3:10.1f} us  {rate:6.2f} GB/s")
    for name in list(times)[1:]:
        ratios = [copy / put for copy, put in zip(times[name], times["put"], strict=True)]
        twentieths = quantiles(ratios, n=20)
        print(
            f"{name} / put: {median(ratios):.3f} (middle 90 %: {twentieths[0]:.3f} to "
            f"{twentieths[-1]:.3f}, {len(ratios)} rounds)"
        )
    for took in mycoll.spawn(first_bytes, 2, (options.mapped,))[0]:
        print(f"first byte of {options.mapped} mapped ones  {took / 1e3:10.1f} us")


if __name__ == "__main__":
    main()
