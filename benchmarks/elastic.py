"""Measures how fast a group continues after a death, and how fast a process joins it.

    python benchmarks/elastic.py [--backend mycoll|gloo|group|nccl2] [--ranks 4] [--events 20]
                                 [--no-store] [--idle] [--device cpu|cuda]
    python benchmarks/elastic.py --table [--events 200]

The ranks are processes of this host. Each event kills one random rank, lets the survivors
continue, and then lets a process join that has imported torch before.
mycoll, gloo: torch's interface (enable_reconfigure), which needs torch 2.14 or newer. This process
sends the ranks the handles of the next group, as a scheduler would.
group: mycoll.ElasticGroup, whose ranks agree on the next group by themselves.
--idle: no collective runs when the rank is killed, and times count from the call of reconfigure().
--device cuda: with CUDA tensors. nccl2 needs it, and --idle. Without a GPU, use stand-ins:
`./dev build` with a torch that is built for CUDA 13, and LD_PRELOAD as in tests/standins/cuda.
--no-store: the process that serves the rendezvous store is killed before the first event.
--table: all rows of a results page. A row has that many events; those of gloo have 5, because each
takes 20 seconds. The last row needs endpoint_test, a C++ test that a checkout builds: 64 ranks are
threads of processes that represent 8 hosts, and each event kills one of these.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TESTS = str(Path(__file__).resolve().parents[1] / "tests")
sys.path.insert(0, TESTS)
os.environ["PYTHONPATH"] = os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])

from worlds.crew import Crew  # noqa: E402

now = time.monotonic


def serve(pipe: Connection) -> None:
    """The process of the rendezvous store."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


def follow(
    pipe: Connection, backend: str, port: int, number: int, device: str = "cpu", idle: bool = False
) -> None:
    """A rank. Forms each group whose handles it receives, and sums until a rank is lost. idle: sums
    once."""
    import torch
    import torch.distributed as dist

    c10d = dist.distributed_c10d
    torch.set_num_threads(1)
    if device == "cuda":
        from standins import cuda

        if cuda.is_here():
            cuda.load()
        torch.cuda.set_device(number % torch.cuda.device_count())
    store: Any = dist.HashStore()
    if port:
        store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(str(number), store) if backend == "mycoll" else store,
        rank=0 if backend == "mycoll" else number,
        world_size=1 if backend == "mycoll" else number + 1,
        timeout=timedelta(seconds=20),
        enable_reconfigure=True,
    )
    pipe.send(c10d._get_reconfigure_handle())
    x = torch.empty(2, device=device)
    while True:
        uuid, handles = pipe.recv()
        c10d._reconfigure(uuid=uuid, handles=handles, timeout=timedelta(seconds=20)).wait()
        x.fill_(1.0)
        dist.all_reduce(x)
        assert x.tolist() == [len(handles)] * 2
        pipe.send(("right", now(), c10d._get_reconfigure_handle()))
        if idle:
            continue
        try:
            x.zero_()
            while x[1] < len(handles):  # all leave in the same step
                x[0], x[1] = 1.0, pipe.poll()
                dist.all_reduce(x)
        except RuntimeError:
            pipe.send(("lost", now(), ""))


def agree(pipe: Connection, *_: Any) -> None:
    """Like follow(), but the ranks agree on the group themselves. A message only starts the
    join."""
    import mycoll
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    pipe.send("")
    members = mycoll.ElasticGroup(handles=pipe.recv(), timeout=timedelta(seconds=20))
    generation = 0
    while True:
        x = torch.ones(2)
        try:
            dist.all_reduce(x, group=members.group)
            if generation != members.generation:
                generation = members.generation
                assert x.tolist() == [members.size] * 2
                pipe.send(("right", now(), members.handle))
            members.admit()
        except dist.DistBackendError:
            pipe.send(("lost", now(), ""))
            members.recover()


class Members:
    """The ranks, and the times that they report."""

    def __init__(self, crew: Crew, backend: str, device: str = "cpu", idle: bool = False) -> None:
        self.crew = crew
        self.backend = backend
        self.device = device
        self.idle = idle
        self.uuid = 0
        self.handles: dict[int, str] = {}  # gloo's change with each group
        self.server = crew.start(serve)
        self.port = crew.receive(self.server)

    def start(self, count: int) -> list[int]:
        program = agree if self.backend == "group" else follow
        started = []
        for _ in range(count):
            number = len(self.handles)
            started.append(
                self.crew.start(program, self.backend, self.port, number, self.device, self.idle)
            )
            self.handles[started[-1]] = ""
        for each in started:
            self.handles[each] = self.crew.receive(each)
        return started

    def form(self, members: list[int]) -> float:
        """Forms a group. Returns the time at which the last rank had the right sum."""
        self.uuid += 1
        handles = [self.handles[each] for each in members]
        for each in members:
            if self.backend != "group":
                self.crew.send(each, (self.uuid, handles))
            elif not self.handles[each]:
                self.crew.send(each, [handle for handle in handles if handle][:1])
        return max(self.answer(each, "right") for each in members)

    def answer(self, member: int, word: str) -> float:
        found, when, handle = self.crew.receive(member)
        while found == "lost" and word == "right":  # it detected that others had left
            found, when, handle = self.crew.receive(member)
        assert found == word, found
        if handle:
            self.handles[member] = handle
        return float(when)


def run(
    group: Members, ranks: int, events: int, has_store: bool, seed: int
) -> dict[str, list[float]]:
    chance = random.Random(seed)
    crew = group.crew
    members = group.start(ranks)
    times: dict[str, list[float]] = {
        "from the exception": [], "from the kill": [], "join": []
    }  # fmt: skip
    spares: list[int] = []
    if group.backend == "group":  # each rank joins the ones before it
        for count in range(1, ranks + 1):
            group.form(members[:count])
    else:
        group.form(members)
    if not has_store:
        crew.kill([group.server])
        group.port = 0  # later processes have no store either
    for _ in range(events):
        if not spares:
            spares = group.start(min(8, events))
            time.sleep(1)
        time.sleep(0.2)
        victim = members.pop(chance.randrange(len(members)))
        killed = now()
        crew.signal(victim, signal.SIGKILL)
        if group.idle:
            time.sleep(0.2)
            noticed = now()
        else:
            noticed = max(group.answer(each, "lost") for each in members)
        right = group.form(members)
        times["from the exception"].append(1e3 * (right - noticed))
        times["from the kill"].append(1e3 * (right - killed))
        crew.kill([victim])
        time.sleep(0.2)
        members.insert(chance.randrange(len(members) + 1), spares.pop())
        began = now()
        times["join"].append(1e3 * (group.form(members) - began))
    return times


def summary(times: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile, or the maximum of few times."""
    ordered = sorted(times)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def table(events: int, seed: int) -> None:
    columns = ("events", "from the exception", "from the kill", "join")
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")

    def show(name: str, times: list[list[float]]) -> None:
        cells = (", ".join(f"{each:.1f}" for each in summary(one)) if one else "" for one in times)
        print(f"| {name} | {max(map(len, times))} | {' | '.join(cells)} |", flush=True)

    for backend, ranks, has_store in (
        ("mycoll", 4, True), ("mycoll", 8, True), ("mycoll", 16, True), ("mycoll", 4, False),
        ("gloo", 4, True), ("group", 4, True), ("group", 8, True),
    ):  # fmt: skip
        count = min(events, 5) if backend == "gloo" else events
        with Crew() as crew:
            times = run(Members(crew, backend), ranks, count, has_store, seed)
        store = "" if has_store else ", the store's process was killed before"
        show(f"{backend}, {ranks} ranks{store}", list(times.values()))
    show("64 ranks on 8 hosts, one host is killed", [[], hosts_killed(events), []])


def hosts_killed(events: int) -> list[float]:
    import mycoll

    test = Path(mycoll.__file__).parents[2] / "tests" / "endpoint_test"
    command = [str(test), "aHostIsLost"]
    environment = {**os.environ, "HOSTS_KILLED": str(events)}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return [float(each) for each in re.findall(r"after ([\d.]+) ms", output.stdout)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="mycoll", choices=("mycoll", "gloo", "group", "nccl2"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--events", type=int, help="200 of each row of a table, otherwise 20")
    parser.add_argument("--no-store", action="store_true")
    parser.add_argument("--idle", action="store_true")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        table(given.events or 200, given.seed)
        return
    events = given.events or 20
    with Crew() as crew:
        group = Members(crew, given.backend, given.device, given.idle)
        times = run(group, given.ranks, events, not given.no_store, given.seed)
    if given.json:
        print(json.dumps(times))
        return
    print(f"{given.backend}, {given.ranks} ranks, {given.device}, {events} events, milliseconds")
    for name, values in times.items():
        median, p99 = summary(values)
        print(f"{name:20} median {median:8.1f}  p99 {p99:8.1f}")


if __name__ == "__main__":
    main()
