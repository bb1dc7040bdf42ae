"""Processes of one mycoll.ElasticGroup that are killed, stopped and started at random.

Each member repeatedly contributes its own power of two to a sum. The sum shows which ranks took
part, and must be the same on all of them."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
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
MOST_SHARED = 48 << 20
# A process's memory is compared with that of its first groups, which are this many.
WARM = 6
# The allowed growth of a process after any number of groups.
MOST_GROWTH = {"heap": 512 << 10, "resident": 2 << 20}
# In the walk, one process is spared for this many steps, and then none for as many.
SPARED = 50


class Mallinfo(ctypes.Structure):
    """mallinfo2() of glibc 2.33 and later."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


class Memory(NamedTuple):
    """Memory of this process, in bytes."""

    heap: int  # allocated by malloc; 0 if glibc does not report it
    resident: int  # without files and shared memory
    shared: int  # mappings of mycoll's shared memory

    @staticmethod
    def settle() -> None:
        """From now on, large tensors have their own pages and do not fragment the heap."""
        gc.collect()
        gc.freeze()
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD

    @staticmethod
    def used() -> Memory:
        gc.collect()
        heap = 0
        if (mallinfo := getattr(ctypes.CDLL(None), "mallinfo2", None)) is not None:
            mallinfo.restype = Mallinfo
            found = mallinfo()
            heap = found.uordblks + found.hblkhd
        resident = re.search(r"RssAnon:\s+(\d+) kB", (PROC / "status").read_text())
        assert resident is not None
        ranges = re.findall(r"(?m)^(\w+)-(\w+) .*/memfd:mycoll", (PROC / "maps").read_text())
        shared = sum(int(end, 16) - int(begin, 16) for begin, end in ranges)
        return Memory(heap, 1024 * int(resident[1]), shared)


class Report(NamedTuple):
    """Sent whenever the group has changed."""

    generation: int
    total: int
    rank: int
    size: int
    when: float
    descriptors: int
    threads: int
    memory: Memory


def member(pipe: Connection, bit: int, handles: Sequence[str], options: dict[str, Any]) -> None:
    if namespace := os.environ.get("NETWORK_NAMESPACE"):
        enter(namespace)
    torch.set_num_threads(1)
    Memory.settle()
    store = options.pop("store", None)
    if store is not None:
        make = dist.TCPStore if store[1] >= 0 else dist.FileStore
        options["store"] = make(*store)
    recovery = timedelta(seconds=options.pop("recovery", RECOVERY))
    patience = options.pop("patience", None)
    persists = options.pop("persists", False)
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
                pipe.send(Report(*report, Memory.used()))
            if pipe.poll(0.001):  # yields the CPU to other tests
                pipe.recv()
                break
            members.admit(recovery)
        except dist.DistBackendError:
            while True:
                try:
                    members.recover(recovery)
                    break
                except dist.DistBackendError as error:
                    pipe.send(str(error))
                    if not persists:
                        return
    members.close()
    pipe.send("closed")


class ElasticCrew(Crew):
    """The processes of one group. options: arguments of each mycoll.ElasticGroup, and
    `store`: the arguments of a TCPStore or FileStore;
    `recovery`: the timeout of recover(), in seconds;
    `patience`: the timeout of operations, in seconds, if it differs from the first group's;
    `persists`: whether members call recover() again after it has failed."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self._bits: dict[int, int] = {}  # of each process
        self._handles: dict[int, str] = {}
        self.lives: dict[int, list[Report]] = {}  # the reports of each process

    def enlist(self, count: int, through: Sequence[int] = (), **environment: str) -> list[int]:
        """Starts processes, which join through these members or find each other in the store."""
        handles = [self._handles[number] for number in through]
        numbers = []
        for _ in range(count):
            bit = min(set(range(BITS)) - {self._bits[number] for number in self.living})
            numbers.append(self.start(member, bit, handles, dict(self.options), **environment))
            self._bits[numbers[-1]] = bit
        return numbers

    def error(self, number: int) -> str:
        """The error with which the process has ended."""
        while not isinstance(found := self.receive(number), str) or "elastic group" not in found:
            pass
        return found

    def settle(self, without: Sequence[int] = ()) -> float:
        """Waits until all members have the sum of all. Returns the time when the last one had
        it."""
        persists = self.options.get("persists", False)
        numbers = [number for number in self.living if number not in without]
        expected = sum(2 ** self._bits[number] for number in numbers)
        last = []
        for number in numbers:
            while True:
                found = self.receive(number)
                if isinstance(found, str) and persists and "elastic group" in found:
                    continue
                if isinstance(found, str):  # its handle
                    assert "elastic group" not in found, found
                    self._handles[number] = found
                    continue
                # The elements of a sum are equal, and it has one contribution of each rank.
                assert found.total >= 0
                assert found.total.bit_count() == found.size
                assert found.descriptors <= MOST_DESCRIPTORS
                assert found.threads <= MOST_THREADS
                self.lives.setdefault(number, []).append(found)
                self._check_memory(self.lives[number])
                if found.total == expected:
                    break
            last.append(found)
        assert sorted(found.rank for found in last) == list(range(len(numbers)))
        assert len({found.generation for found in last}) == 1
        return max(found.when for found in last)

    @staticmethod
    def _check_memory(life: list[Report]) -> None:
        now = life[-1].memory
        assert now.shared <= MOST_SHARED, life
        for kind, most in MOST_GROWTH.items():
            before = max(getattr(each.memory, kind) for each in life[:WARM])
            assert getattr(now, kind) <= before + most, (kind, len(life), before, now)

    def close(self, number: int) -> None:
        self.send(number, "close")
        while self.receive(number) != "closed":
            pass
        self.join(number)


def walk(seed: int, steps: int, most: int, **options: Any) -> None:
    """Kills, starts and closes processes, several at a time; those that live must form a group.
    With patience: also stops processes, and the others continue without them. A spared process
    shows whether groups leak memory."""
    chance = random.Random(seed)
    kinds = ["kill", "kill", "start", "start", "both", "close"]
    if "patience" in options:
        kinds.append("stop")
    with ElasticCrew(**options) as crew:
        crew.enlist(1)
        crew.settle()
        spared: list[int] = []
        for step in range(steps):
            living = crew.living
            if step % SPARED == 0:
                spared = living[-1:] if step % (2 * SPARED) else []
            mortal = [number for number in living if number not in spared]
            most_victims = min(2, len(mortal), len(living) - 1)
            victims = chance.sample(mortal, chance.randint(1, most_victims)) if most_victims else []
            kind = chance.choice(kinds) if victims else "start"
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
                continue  # no process was started
            crew.settle()
