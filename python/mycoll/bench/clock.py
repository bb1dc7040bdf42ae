"""Times calls by the monotonic clock, on an accelerator by events on the current stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

# So few calls do not fill a device's queue: behind a full one, a call waits for the device.
_UNTHROTTLED_CALLS = 50

now = time.perf_counter_ns


def time_calls(
    calls: Sequence[Callable[[], object]], device: torch.device, host_times: list[int]
) -> list[int]:
    """Nanoseconds of each call.

    host_times: where the device is not the CPU, gets the nanoseconds until calls returned.
    """
    if device.type != "cpu":
        return _time_on_device(calls, device, host_times)
    stamps = [0] * len(calls)
    begin = now()
    for index, call in enumerate(calls):
        call()
        stamps[index] = now()
    return [after - before for before, after in pairwise([begin, *stamps])]


def _time_on_device(
    calls: Sequence[Callable[[], object]], device: torch.device, host_times: list[int]
) -> list[int]:
    torch.accelerator.synchronize(device)
    events = [torch.Event(device.type, enable_timing=True) for _ in range(len(calls) + 1)]
    stamps = []
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        begin = now()
        call()
        stamps.append(now() - begin)
        event.record()
    torch.accelerator.synchronize(device)
    host_times += stamps[:_UNTHROTTLED_CALLS]
    return [int(before.elapsed_time(after) * 1e6) for before, after in pairwise(events)]
