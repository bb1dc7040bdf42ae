"""One measured row, which is the schema of the JSON lines, and its statistics: percentiles, and
confidence intervals by bootstrap, which assumes no distribution."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mycoll.bench.workload import Case, Workload

_RESAMPLES = 2000
_CONFIDENCE = 0.95
# A 95 % interval by bootstrap contains the median in 75 % of all cases with 3 rounds, 92 % with 6.
_FEWEST_ROUNDS = 6


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds of its 95 % confidence interval; None: too few rounds for one."""

    value: float
    low: float | None
    high: float | None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the neighbours in an ascending sequence."""
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _bootstrap(estimate: Callable[..., float], *samples: Sequence[float]) -> Interval:
    """An estimate from samples, which are drawn anew, each by itself, for the interval."""
    value = estimate(*samples)
    if min(map(len, samples)) < _FEWEST_ROUNDS:
        return Interval(value, None, None)
    choices = random.Random(0).choices
    draws = sorted(
        estimate(*(choices(each, k=len(each)) for each in samples)) for _ in range(_RESAMPLES)
    )
    tail = (1 - _CONFIDENCE) / 2 * 100
    return Interval(value, percentile(draws, tail), percentile(draws, 100 - tail))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Median of the ratios of rounds measured next to each other.

    Pairing takes out what disturbs both alike: a neighbour on the machine, the clock frequency.
    """
    return _bootstrap(median, [a / b for a, b in zip(numerators, denominators, strict=True)])


def unpaired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Ratio of the medians of two runs that were not measured together."""
    return _bootstrap(lambda above, below: median(above) / median(below), numerators, denominators)


# Contenders other than backends, by kind.
LEGEND = {
    "floor": "torch's own cost of a call",
    "limit": "memory copies, all ranks together",
    "peer": "in C, without torch",
}

# rounds[r][k][i]: ns of call i in round r on rank k. A rank that takes no part has no calls.
Rounds = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Row:
    """A contender's figures for a case. Times are microseconds of one message, rates GB/s (10^9).

    time is the median over rounds of the mean over ranks and calls; p50, p95 and p99 are over all
    calls of all ranks; min and max are the fastest and the slowest rank's mean (median over
    rounds). ratio compares the time with that of the first backend of the run, round by round: 2
    means that this contender took twice its time; without bounds where there were too few rounds.
    """

    op: str
    size: int
    count: int
    type: str
    redop: str
    root: int
    contender: str
    contender_kind: str
    ranks: int
    time_us: float
    algbw: float
    busbw: float
    wrong: int | None
    p50_us: float
    p95_us: float
    p99_us: float
    min_us: float
    max_us: float
    iterations: int
    rounds_us: list[float]
    ratio_to: str = ""
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    extra: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """The record of the JSON lines."""
        return {"kind": "result", **dataclasses.asdict(self)}


def compared(rows: Sequence[Row], subject: str) -> list[Row]:
    """With ratios to the subject's row, or with none where it is not among them."""
    first = next((row for row in rows if row.contender == subject), None)
    if first is None:
        return list(rows)
    found = []
    for row in rows:
        if row is not first:
            ratio = paired_ratio(row.rounds_us, first.rounds_us)
            row = dataclasses.replace(row, ratio_to=first.contender, ratio=ratio.value)
            row = dataclasses.replace(row, ratio_low=ratio.low, ratio_high=ratio.high)
        found.append(row)
    return found


def make_row(
    case: Case,
    workload: Workload,
    contender: str,
    kind: str,
    wrong: int | None,
    rounds: Rounds,
    extra: dict[str, float],
) -> Row:
    """A contender's row, from the nanoseconds of its calls."""
    messages = 1 if kind == "limit" or (kind == "floor" and case.op == "pingpong") else 0
    unit = 1e3 * (messages or workload.messages)
    taking_part = [[calls for calls in ranks if calls] for ranks in rounds]
    means = [[fmean(calls) / unit for calls in ranks] for ranks in taking_part]
    per_rank = [median(column) for column in zip(*means, strict=True)]
    every = sorted(time / unit for ranks in taking_part for calls in ranks for time in calls)
    time = median(fmean(round_) for round_ in means)
    algbw = workload.size / time / 1e3
    return Row(
        op=case.op,
        size=workload.size,
        count=workload.count,
        type=case.dtype_name,
        redop=case.redop,
        root=case.root,
        contender=contender,
        contender_kind=kind,
        ranks=workload.world.size,
        time_us=time,
        algbw=algbw,
        busbw=algbw * workload.bus_factor,
        wrong=wrong,
        p50_us=percentile(every, 50),
        p95_us=percentile(every, 95),
        p99_us=percentile(every, 99),
        min_us=min(per_rank),
        max_us=max(per_rank),
        iterations=len(taking_part[0][0]),
        rounds_us=[fmean(round_) for round_ in means],
        extra=extra,
    )
