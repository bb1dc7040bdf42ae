"""Processes of one mycoll.ElasticGroup that are killed, stopped and started at random.

Each member sums a value of its own, a power of two, over and over. So a sum shows which ranks it is
of, and must be the same on all of them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import mycoll
import torch
import torch.distributed as dist

from worlds.crew import Crew
from worlds.hosts import enter

PROC = Path("/proc/self")
RECOVERY = 60.0
BITS = 48  # a float64 holds any sum of these powers of two
MOST_DESCRIPTORS, MOST_THREADS = 40, 8


class Report(NamedTuple):
    """Sent whenever the group is another one."""

    generation: int
    total: int
    rank: int
    size: int
    when: float
    descriptors: int
    threads: int


def member(pipe: Connection, bit: int, handles: Sequence[str], options: dict[str, Any]) -> None:
    if namespace := os.environ.get("NETWORK_NAMESPACE"):
        enter(namespace)
    torch.set_num_threads(1)
    store = options.pop("store", None)
    if store is not None:
        options["store"] = dist.TCPStore(*store)
    recovery = timedelta(seconds=options.pop("recovery", RECOVERY))
    patience = options.pop("patience", None)
    try:
        members = mycoll.ElasticGroup(handles=handles, **options)
    except dist.DistBackendError as error:
        pipe.send(str(error))
        return
    pipe.send(members.handle)
    reported = timed = 0
    while True:
        try:
            if patience is not None and members.generation != timed:
                timed = members.generation
                backend = members.group._get_backend(torch.device("cpu"))
                backend._set_default_timeout(timedelta(seconds=patience))
            dist.all_reduce(torch.ones(5), group=members.group)
            x = torch.full((70_000,), 2.0**bit, dtype=torch.float64)
            dist.all_reduce(x, group=members.group)
            if members.generation != reported:
                reported = members.generation
                total = int(x[0]) if bool((x == x[0]).all()) else -1
                used = (sum(1 for _ in (PROC / each).iterdir()) for each in ("fd", "task"))
                report = (reported, total, members.rank, members.size, time.monotonic(), *used)
                pipe.send(Report(*report))
            if pipe.poll():
                pipe.recv()
                break
            members.admit(recovery)
        except dist.DistBackendError:
            try:
                members.recover(recovery)
            except dist.DistBackendError as error:
                pipe.send(str(error))
                return
    members.close()
    pipe.send("closed")


class ElasticCrew(Crew):
    """Members of one group, seen from outside. options: of each mycoll.ElasticGroup to come, with
    the address of a TCPStore as `store`; in seconds, `recovery`: the timeout of recover(), and
    `patience`: of operations, where it is not that of the first group."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self._bits: dict[int, int] = {}  # of each process
        self._handles: dict[int, str] = {}

    def enlist(self, count: int, through: Sequence[int] = (), **environment: str) -> list[int]:
        """New processes, which join through these, or find each other in the store."""
        handles = [self._handles[number] for number in through]
        numbers = []
        for _ in range(count):
            bit = min(set(range(BITS)) - {self._bits[number] for number in self.living})
            numbers.append(self.start(member, bit, handles, dict(self.options), **environment))
            self._bits[numbers[-1]] = bit
        return numbers

    def error(self, number: int) -> str:
        """Why the process has ended."""
        while not isinstance(found := self.receive(number), str) or "elastic group" not in found:
            pass
        return found

    def settle(self, without: Sequence[int] = ()) -> float:
        """Waits until all have the sum of all. Returns when the last one had it."""
        numbers = [number for number in self.living if number not in without]
        expected = sum(2 ** self._bits[number] for number in numbers)
        last = []
        for number in numbers:
            while True:
                found = self.receive(number)
                if isinstance(found, str):  # it was started
                    assert "elastic group" not in found, found
                    self._handles[number] = found
                    continue
                # Never a sum of unequal parts.
                assert found.total >= 0
                assert found.total.bit_count() == found.size
                assert found.descriptors <= MOST_DESCRIPTORS
                assert found.threads <= MOST_THREADS
                if found.total == expected:
                    break
            last.append(found)
        assert sorted(found.rank for found in last) == list(range(len(numbers)))
        assert len({found.generation for found in last}) == 1
        return max(found.when for found in last)

    def close(self, number: int) -> None:
        self.send(number, "close")
        while self.receive(number) != "closed":
            pass
        self.join(number)


def walk(seed: int, steps: int, most: int, **options: Any) -> None:
    """Kills, starts and closes processes, several at once; all that live find each other. With
    patience: also stops them, so that the others continue without."""
    chance = random.Random(seed)
    kinds = ["kill", "kill", "start", "start", "both", "close"]
    if "patience" in options:
        kinds.append("stop")
    with ElasticCrew(**options) as crew:
        crew.enlist(1)
        crew.settle()
        for _ in range(steps):
            living = crew.living
            victims = chance.sample(living, chance.randint(1, min(2, len(living) - 1) or 1))
            kind = "start" if len(living) == 1 else chance.choice(kinds)
            survivors = [n for n in living if kind == "start" or n not in victims]
            if kind in ("start", "both") and len(survivors) < most:
                through = chance.sample(survivors, min(2, len(survivors)))
                crew.enlist(chance.randint(1, most - len(survivors)), through)
            if kind in ("kill", "both"):
                crew.kill(victims)
            elif kind == "close":
                crew.close(victims[0])
            elif kind == "stop":
                for each in victims:
                    crew.signal(each, signal.SIGSTOP)
                crew.settle(without=victims)
                for each in victims:
                    crew.signal(each, signal.SIGCONT)
            elif len(living) == len(crew.living):
                continue  # nobody has come
            crew.settle()
