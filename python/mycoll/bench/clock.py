"""Times calls on the CPU by the monotonic clock, on the GPU by events on the current stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

_LATE_SECONDS = 0.01

now = time.perf_counter_ns


def late_entry(late: bool) -> None:
    """Comes late, if told so, for a barrier to wait for."""
    if late:
        time.sleep(_LATE_SECONDS)


def time_calls(
    calls: Sequence[Callable[[], object]], device: torch.device, align: Callable[[], object] | None
) -> list[int]:
    """Nanoseconds of each call. With `align` the ranks meet before each; that is not counted."""
    if device.type != "cpu":
        return _time_on_gpu(calls, align)
    if align is not None:
        return _time_aligned(calls, align)
    stamps = [0] * len(calls)
    begin = now()
    for index, call in enumerate(calls):
        call()
        stamps[index] = now()
    return [after - before for before, after in pairwise([begin, *stamps])]


def _time_aligned(calls: Sequence[Callable[[], object]], align: Callable[[], object]) -> list[int]:
    times = []
    for call in calls:
        align()
        begin = now()
        call()
        times.append(now() - begin)
    return times


def _time_on_gpu(
    calls: Sequence[Callable[[], object]], align: Callable[[], object] | None
) -> list[int]:
    if align is not None:
        times = []
        for call in calls:
            align()
            torch.cuda.synchronize()
            begin = now()
            call()
            torch.cuda.synchronize()
            times.append(now() - begin)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        call()
        event.record()
    torch.cuda.synchronize()
    return [int(before.elapsed_time(after) * 1e6) for before, after in pairwise(events)]
