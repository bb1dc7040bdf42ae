"""Processes of one mycoll.ElasticGroup that are killed, stopped and started at random.

Each member sums a value of its own, a power of two, over and over. So a sum shows which ranks it is
of, and must be the same on all of them."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import mycoll
import torch
import torch.distributed as dist

from worlds.hosts import enter

PATIENCE = 60.0


def member(
    pipe: Connection, bit: int, handles: Sequence[str], options: dict[str, Any], env: dict[str, str]
) -> None:
    """Reports (generation, sum, rank, size, when) whenever the group is another one."""
    os.environ.update(env)
    if "NETWORK_NAMESPACE" in env:
        enter(env["NETWORK_NAMESPACE"])
    torch.set_num_threads(1)
    store = options.pop("store", None)
    if store is not None:
        options["store"] = dist.TCPStore(*store)
    recovery = timedelta(seconds=options.pop("recovery", PATIENCE))
    try:
        members = mycoll.ElasticGroup(handles=handles, **options)
    except dist.DistBackendError as error:
        pipe.send(str(error))
        return
    pipe.send(members.handle)
    reported = 0
    while True:
        try:
            dist.all_reduce(torch.ones(5), group=members.group)
            x = torch.full((70_000,), 2.0**bit, dtype=torch.float64)
            dist.all_reduce(x, group=members.group)
            if members.generation != reported:
                reported = members.generation
                total = int(x[0]) if bool((x == x[0]).all()) else -1
                pipe.send((reported, total, members.rank, members.size, time.monotonic()))
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


class Walk:
    """The processes, seen from outside."""

    def __init__(self, **options: Any) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.options = options
        self.living: dict[int, tuple[Any, Connection]] = {}  # by bit
        self.handles: dict[int, str] = {}
        self.next_bit = 0

    def start(self, count: int, through: Sequence[int] = (), **env: str) -> list[int]:
        """New processes, which join through these, or find each other in the store."""
        bits = []
        for _ in range(count):
            here, there = self.context.Pipe()
            handles = [self.handles[bit] for bit in through]
            process = self.context.Process(
                target=member, args=(there, self.next_bit, handles, dict(self.options), env)
            )
            process.start()
            there.close()
            self.living[self.next_bit] = (process, here)
            bits.append(self.next_bit)
            self.next_bit += 1
        return bits

    def receive(self, bit: int, timeout: float = PATIENCE) -> Any:
        pipe = self.living[bit][1]
        assert pipe.poll(timeout), f"nothing from process {bit}"
        return pipe.recv()

    def error(self, bit: int) -> str:
        """Why the process has ended."""
        while not isinstance(found := self.receive(bit), str) or "elastic group" not in found:
            pass
        return found

    def settle(self, without: Sequence[int] = ()) -> float:
        """Waits until all have the sum of all. Returns when the last one had it."""
        bits = [bit for bit in self.living if bit not in without]
        expected = sum(2**bit for bit in bits)
        when, ranks, generations = 0.0, [], set()
        for bit in bits:
            while True:
                found = self.receive(bit)
                if isinstance(found, str):  # it was started
                    assert "elastic group" not in found, found
                    self.handles[bit] = found
                    continue
                generation, total, rank, size, at = found
                # Only sums over processes that were started; never one of unequal parts.
                assert total >= 0
                assert total < 2**self.next_bit
                assert bin(total).count("1") == size
                if total == expected:
                    break
            when = max(when, at)
            ranks.append(rank)
            generations.add(generation)
        assert sorted(ranks) == list(range(len(bits)))
        assert len(generations) == 1
        return when

    def kill(self, bits: Sequence[int]) -> float:
        now = time.monotonic()
        for bit in bits:
            os.kill(self.living[bit][0].pid, signal.SIGKILL)
        for bit in bits:
            process, pipe = self.living.pop(bit)
            process.join()
            pipe.close()
        return now

    def signal(self, bit: int, number: int) -> None:
        os.kill(self.living[bit][0].pid, number)

    def close(self, bit: int) -> None:
        process, pipe = self.living.pop(bit)
        pipe.send("close")
        while pipe.recv() != "closed":
            pass
        process.join(PATIENCE)
        assert process.exitcode == 0

    def end(self) -> None:
        for process, _ in self.living.values():
            process.kill()
        for process, _ in self.living.values():
            process.join()


def walk(seed: int, steps: int, most: int, **options: Any) -> list[float]:
    """Kills, starts and closes processes, several at once; all that live always find each other."""
    chance = random.Random(seed)
    crew = Walk(**options)
    try:
        crew.start(1)
        crew.settle()
        taken = []
        for _ in range(steps):
            kind = chance.choice(["kill", "kill", "start", "start", "both", "close"])
            killed = []
            if kind in ("kill", "both") and len(crew.living) > 1:
                count = chance.randint(1, min(2, len(crew.living) - 1))
                killed = chance.sample(sorted(crew.living), count)
            survivors = [bit for bit in crew.living if bit not in killed]
            if kind in ("start", "both") or len(survivors) < 2:
                through = chance.sample(survivors, min(len(survivors), 2))
                crew.start(chance.randint(1, max(1, most - len(survivors))), through)
            if killed:
                began = crew.kill(killed)
                taken.append(crew.settle() - began)
            elif len(crew.living) > len(survivors):
                crew.settle()
            if kind == "close" and len(crew.living) > 1:
                crew.close(chance.choice(sorted(crew.living)))
                crew.settle()
        return taken
    finally:
        crew.end()
