"""The measuring loop: verify all contenders, then rounds in the order A B, B A, A B, ..."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median

import torch.distributed as dist

from mycoll._leaving import described
from mycoll.bench.arena import MAX_WINDOWS
from mycoll.bench.collectives import BarrierWorkload, CollectiveWorkload
from mycoll.bench.contenders import Contender
from mycoll.bench.options import REDUCING, ROOTED, Options
from mycoll.bench.pairwise import PAIRWISE
from mycoll.bench.result import Row, compared, make_row
from mycoll.bench.workload import Case, Unsupported, Workload
from mycoll.bench.world import World
from mycoll.shared import shared_tensors

# A round has no more calls than there are buffers, and enough for a mean.
_FEWEST_CALLS = 3
_MOST_WARMUPS = 5
_PROBE_CALLS = 20
_ROUND_NS = 20e6
_VERIFIED_CALLS = 2

_WORKLOADS: dict[str, type[Workload]] = {**PAIRWISE, "barrier": BarrierWorkload}  # or a collective


def cases(options: Options, op: str) -> Iterator[Case]:
    """The cases of an operation, as the options choose them."""
    root = 0 if op in ROOTED else -1
    if op == "barrier":
        yield Case(op, 0, "float32", "none", root)
        return
    for dtype in options.dtypes:
        for redop in options.redops if op in REDUCING else ("none",):
            for size in options.sizes:
                yield Case(op, size, dtype, redop, root)


@dataclass
class History:
    """The outcome of earlier cases: which backend could do what, and which failed."""

    able: set[tuple[str, str, str, str]] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


@dataclass
class Measurement:
    """One case with all contenders that can run it. `notes` on rank 0: which cannot, and why."""

    case: Case
    contenders: Sequence[Contender]
    world: World
    options: Options
    history: History
    notes: list[str] = field(default_factory=list)
    _shared: Workload | None = None
    _wrong: dict[str, int | None] = field(default_factory=dict)
    _calls: dict[str, tuple[int, int]] = field(default_factory=dict)

    def run(self) -> list[Row]:
        """The rows, on rank 0; in the order of the contenders."""
        kind = _WORKLOADS.get(self.case.op, CollectiveWorkload)
        try:
            workload = kind(self.case, self.world, self.options.hot)
            if any(contender.shares_memory for contender in self.contenders):
                with shared_tensors():
                    self._shared = kind(self.case, self.world, self.options.hot)
        except Unsupported as reason:
            self.notes.append(str(reason))
            return []
        try:
            return self._measure(workload)
        finally:
            self._shared = None
            for contender in self.contenders:
                contender.release()
            gc.collect()

    def _measure(self, workload: Workload) -> list[Row]:
        able = [contender for contender in self.contenders if self._admit(contender, workload)]
        able = [contender for contender in able if self._plan_calls(contender, workload)]
        rounds: dict[str, list[list[list[int]]]] = {contender.name: [] for contender in able}
        for number in range(self.options.rounds):
            for contender in able[:: 1 if number % 2 == 0 else -1]:
                # No rank prepares a round while another is still in the one before.
                self.world.barrier()
                try:
                    times = contender.run(*self._calls[contender.name])
                    rounds[contender.name].append(times)
                except Unsupported as reason:
                    able.remove(contender)
                    self.notes.append(f"{contender.name}: {reason}")
        rows: list[Row] = []
        for contender in able:
            per_rank = self.world.gather_all(rounds[contender.name])
            extra = contender.extra()
            if self.world.rank == 0:
                merged = [list(chain.from_iterable(parts)) for parts in zip(*per_rank, strict=True)]
                name, kind = contender.name, contender.kind
                wrong = self._wrong[name]
                rows.append(make_row(self.case, workload, name, kind, wrong, merged, extra))
        return compared(rows, self.options.backends[0])

    def _admit(self, contender: Contender, workload: Workload) -> bool:
        """Prepares and verifies; all ranks agree on whether this contender takes part."""
        error, failed = "", False
        wrong: int | None = None
        try:
            own = self._shared if contender.shares_memory else workload
            assert own is not None
            contender.prepare(own)
            for seed in range(1, _VERIFIED_CALLS + 1):
                found = contender.verify(seed)
                if found is not None:
                    wrong = found + (wrong or 0)
        except Unsupported as reason:
            error = str(reason) or "-"
        except Exception as cause:  # a backend may raise anything for what it cannot do
            # In trouble: a dead group, or a case like one that it could do before.
            could_before = self._ability(contender) in self.history.able
            in_trouble = could_before or isinstance(cause, dist.DistError)
            error, failed = described(cause), contender.kind == "backend" and in_trouble
        answers = self.world.gather_all((error, failed, wrong))
        errors = [text for text, _, _ in answers if text]
        counts = [count for _, _, count in answers if count is not None]
        self._wrong[contender.name] = sum(counts) if counts else None
        if any(failed for _, failed, _ in answers):
            self.history.failed.add(contender.name)
        if not errors:
            self.history.able.add(self._ability(contender))
        elif errors[0] != "-":
            self.notes.append(f"{contender.name}: {errors[0]}")
        return not errors

    def _ability(self, contender: Contender) -> tuple[str, str, str, str]:
        case = self.case
        return contender.name, case.op, case.dtype_name, case.redop

    def _plan_calls(self, contender: Contender, workload: Workload) -> bool:
        """Warm-ups and calls of its rounds, the same on all ranks; whether it got that far."""
        try:
            iterations = self.options.iterations or self._calls_by_time(contender, workload)
        except Unsupported as reason:
            self.notes.append(f"{contender.name}: {reason}")
            return False
        warmups = self.options.warmups
        if warmups < 0:
            warmups = max(1, min(_MOST_WARMUPS, iterations // 4))
        self._calls[contender.name] = self.world.share((warmups, iterations))
        return True

    def _calls_by_time(self, contender: Contender, workload: Workload) -> int:
        """Probes twice: the first is short, since a call may take a second, and cold."""
        most = MAX_WINDOWS // workload.messages - _MOST_WARMUPS
        calls = 1
        for _ in range(2):
            times = contender.run(1, calls)
            slowest = max((median(per_call) for per_call in times if per_call), default=1.0)
            fitting = int(_ROUND_NS / max(1.0, slowest))
            calls = self.world.share(max(_FEWEST_CALLS, min(_PROBE_CALLS, fitting)))
        return max(_FEWEST_CALLS, min(most, fitting))
