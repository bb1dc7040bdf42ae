"""Code that all fault tests share. Ranks are those of `worlds`; times are CLOCK_MONOTONIC of one
host."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from worlds.pool import Pool, World, WorldFailure
from worlds.worker import Ctx

NO_HANG = 30.0  # seconds after which a rank without an answer counts as hung


class Skip(Exception):
    """This scenario cannot be run here, for the reason in the text."""


@dataclass(frozen=True)
class Seen:
    """The result of an action on a rank."""

    kind: str  # the type of the exception, or ""
    text: str
    began: float
    ended: float
    left: float = 0.0  # the seconds that destroy_process_group took
    value: Any = None

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True)
class Lost:
    """A rank without an answer."""

    how: str


def attempt(action: Callable[[], Any]) -> Seen:
    began = time.monotonic()
    try:
        value = action()
    except BaseException as error:
        return Seen(type(error).__name__, str(error), began, time.monotonic())
    return Seen("", "", began, time.monotonic(), value=value)


def attempt_and_leave(action: Callable[[], Any]) -> Seen:
    seen = attempt(action)
    began = time.monotonic()
    if dist.is_initialized():
        dist.destroy_process_group()
    left = time.monotonic() - began
    return Seen(seen.kind, seen.text, seen.began, seen.ended, left, seen.value)


def is_last(ctx: Ctx, last: int, here: dist.Store | None = None) -> bool:
    """Whether this is that rank. It returns only after the others have called this, and have thus
    completed earlier calls. here: a store, if the one of the test run cannot be reached."""
    here = here or ctx.store("before the last")
    if ctx.rank != last:
        here.set(str(ctx.rank), "")
        return False
    here.wait([str(rank) for rank in range(ctx.size) if rank != last])
    return True


def kill_one(ctx: Ctx, victim: int, after: float = 0.0, here: dist.Store | None = None) -> None:
    """Kills that rank by SIGKILL once all others have called this. With `after`, it continues for
    so many seconds."""
    if not is_last(ctx, victim, here):
        return
    if after:
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


@dataclass
class Outcome:
    verdict: str  # "pass", "FAIL" or "skip"
    seconds: float | None = None  # the slowest rank
    notes: list[str] = field(default_factory=list)
    sample: str = ""  # an error's text


@dataclass
class Judge:
    """Collects expectations that were not met."""

    patience: float = 1.0  # limits are multiplied by it
    unmet: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    slowest: float | None = None
    sample: str = ""

    def expect(self, is_met: bool, text: str) -> None:
        if not is_met and text not in self.unmet:
            self.unmet.append(text)

    def took(self, what: str, seconds: float, limit: float) -> None:
        self.slowest = max(self.slowest or 0.0, seconds)
        self.expect(
            seconds <= limit * self.patience, f"{what} took {show(seconds)} (limit {show(limit)})"
        )

    def raised(
        self,
        answers: dict[int, Any],
        since: float | None,
        limit: float,
        *words: str,
        kind: str = "DistBackendError",
    ) -> None:
        """Expects each rank to raise within the limit, with a text that matches each pattern."""
        for rank, seen in answers.items():
            if not isinstance(seen, Seen):
                self.expect(False, f"rank {rank}: {seen.how if seen else 'no answer'}")
                continue
            start = seen.began if since is None else max(since, seen.began)
            self.expect(seen.kind != "", f"rank {rank} raised nothing")
            if not seen.kind:
                continue
            self.took(f"rank {rank}", seen.ended - start, limit)
            self.expect(
                re.fullmatch(kind, seen.kind) is not None, f"raised {seen.kind}, not {kind}"
            )
            for word in words:
                found = re.search(word, seen.text, re.IGNORECASE)
                plain = word.replace(r"\b", "").replace(".*", "...").replace("|", " or ")
                self.expect(found is not None, f"the text lacks “{plain}”")
            self.expect(seen.left <= 1.0 * self.patience, f"destroy took {show(seen.left)}")
            self.sample = self.sample or f"{seen.kind}: {seen.text}"

    def fine(self, answers: dict[int, Any]) -> None:
        """Expects each rank to complete without an exception."""
        for rank, seen in answers.items():
            if not isinstance(seen, Seen):
                self.expect(False, f"rank {rank}: {seen.how if seen else 'no answer'}")
            elif seen.kind:
                self.expect(False, f"rank {rank} raised {seen.kind} after {show(seen.seconds)}")
                self.sample = self.sample or f"{seen.kind}: {seen.text}"

    def outcome(self) -> Outcome:
        verdict = "FAIL" if self.unmet else "pass"
        return Outcome(verdict, self.slowest, self.unmet + self.notes, self.sample)


def show(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


SUITE_PATIENCE = 10.0  # of the scenarios that are in the test suite


@dataclass
class Stage:
    """The backend and transport of a scenario. Creates its worlds."""

    pool: Pool
    transport: str = ""
    patience: float = 1.0
    seed: int = 0

    @property
    def family(self) -> str:
        return self.pool.options.backend

    def judge(self) -> Judge:
        return Judge(self.patience)

    @contextlib.contextmanager
    def world(self, size: int, timeout: float = 20.0, **changes: Any) -> Iterator[World]:
        spec = self.pool.spec(size, self.transport, timeout=timeout, **changes)
        world = self.pool.fresh(spec)
        try:
            yield world
        finally:
            world.kill()


def fates(world: World, but: tuple[int, ...] = (), limit: float = NO_HANG) -> dict[int, Any]:
    """The result of the job on each rank, or Lost, without the ranks in `but`. A job that raises is
    an error in the test: jobs catch expected exceptions by attempt()."""
    try:
        world.finish(limit, allow_gone=True)
    except WorldFailure:
        if any(member.outcome and member.outcome[0] == "error" for member in world.members):
            raise
    found: dict[int, Any] = {}
    for member in world.members:
        if member.rank in but:
            continue
        kind, value = member.outcome or ("silent", f"hung for {limit:.0f} s")
        found[member.rank] = value if kind == "ok" else Lost(str(value).splitlines()[-1])
    return found


def answers(world: World, but: tuple[int, ...] = (), limit: float = NO_HANG) -> dict[int, Any]:
    """Like fates(), but fails if a rank is Lost that is not in `but`."""
    found = fates(world, but, limit)
    lost = {rank: fate.how for rank, fate in found.items() if isinstance(fate, Lost)}
    if lost:
        raise WorldFailure(f"ranks without an answer: {lost}")
    return found
