"""How fast a group continues after a death, and how fast a process joins it.

    python benchmarks/elastic.py [--backend mycoll|gloo|group] [--ranks 4] [--events 20]
                                 [--no-store]

The ranks are processes of this host. Each event kills one random rank, lets the survivors
continue, and then lets a process join that has imported torch before.
mycoll, gloo: torch's interface (enable_reconfigure), which needs torch 2.14 or newer. This process
sends the ranks the handles of the next group, as a scheduler would.
group: mycoll.ElasticGroup, whose ranks agree on the next group by themselves.
--no-store: the process that serves the rendezvous store is killed before the first event.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import statistics
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

now = time.monotonic


def serve(pipe: Connection) -> None:
    """The process of the rendezvous store."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


def follow(pipe: Connection, backend: str, port: int, number: int) -> None:
    """A rank: continues with the handles that it receives, and sums until a rank is lost."""
    import torch
    import torch.distributed as dist

    c10d = dist.distributed_c10d
    torch.set_num_threads(1)
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
    x = torch.empty(2)
    while True:
        uuid, handles = pipe.recv()
        c10d._reconfigure(uuid=uuid, handles=handles, timeout=timedelta(seconds=20)).wait()
        x.fill_(1.0)
        dist.all_reduce(x)
        assert x.tolist() == [len(handles)] * 2
        pipe.send(("right", now(), c10d._get_reconfigure_handle()))
        try:
            x.zero_()
            while x[1] < len(handles):  # all leave in the same step
                x[0], x[1] = 1.0, pipe.poll()
                dist.all_reduce(x)
        except RuntimeError:
            pipe.send(("lost", now(), ""))


def agree(pipe: Connection, *_: Any) -> None:
    """As follow(), but nothing says which ranks continue; a message only says when to join."""
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


class Crew:
    def __init__(self, backend: str) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.backend = backend
        self.uuid = 0
        self.started = 0
        here, there = self.context.Pipe()
        self.server = self.context.Process(target=serve, args=(there,), daemon=True)
        self.server.start()
        self.port = here.recv()

    def start(self, count: int) -> list[tuple[Any, Connection, str]]:
        fresh = []
        for _ in range(count):
            here, there = self.context.Pipe()
            arguments = (there, self.backend, self.port, self.started)
            program = agree if self.backend == "group" else follow
            process = self.context.Process(target=program, args=arguments, daemon=True)
            process.start()
            fresh.append((process, here))
            self.started += 1
        return [(process, pipe, pipe.recv()) for process, pipe in fresh]

    def form(self, members: list[tuple[Any, Connection, str]]) -> float:
        """Returns the time when the last one had the right sum."""
        self.uuid += 1
        handles = [handle for _, _, handle in members]
        for _, pipe, handle in members:
            if self.backend != "group":
                pipe.send((self.uuid, handles))
            elif not handle:
                pipe.send([each for each in handles if each][:1])
        return max(self.answers(members, "right"))

    def answers(self, members: list[tuple[Any, Connection, str]], word: str) -> list[float]:
        times = []
        for i, (process, pipe, _) in enumerate(members):
            found, when, handle = pipe.recv()
            while found == "lost" and word == "right":  # it had noticed that others went on
                found, when, handle = pipe.recv()
            assert found == word, found
            if handle:  # gloo's is another one each time
                members[i] = (process, pipe, handle)
            times.append(when)
        return times


def run(
    backend: str, ranks: int, events: int, has_store: bool, seed: int
) -> dict[str, list[float]]:
    chance = random.Random(seed)
    crew = Crew(backend)
    members = crew.start(ranks)
    times: dict[str, list[float]] = {
        "from the exception": [], "from the kill": [], "join": []
    }  # fmt: skip
    spares: list[Any] = crew.start(events) if not has_store else []
    if backend == "group":  # each one joins those before it
        fresh, members = members, []
        for each in fresh:
            members.append(each)
            crew.form(members)
    else:
        crew.form(members)
    if not has_store:
        crew.server.kill()
        crew.server.join()
    for _ in range(events):
        if not spares:
            spares = crew.start(min(8, events))
            time.sleep(1)
        time.sleep(0.2)
        victim = members.pop(chance.randrange(len(members)))
        killed = now()
        os.kill(victim[0].pid, signal.SIGKILL)
        noticed = max(crew.answers(members, "lost"))
        right = crew.form(members)
        times["from the exception"].append(1e3 * (right - noticed))
        times["from the kill"].append(1e3 * (right - killed))
        victim[0].join()
        time.sleep(0.2)
        members.insert(chance.randrange(len(members) + 1), spares.pop())
        began = now()
        times["join"].append(1e3 * (crew.form(members) - began))
    for process, _, _ in members + spares:
        process.kill()
    crew.server.kill()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="mycoll", choices=("mycoll", "gloo", "group"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--no-store", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    times = run(given.backend, given.ranks, given.events, not given.no_store, given.seed)
    if given.json:
        print(json.dumps(times))
        return
    print(f"{given.backend}, {given.ranks} ranks, {given.events} events, milliseconds")
    for name, all_of_it in times.items():
        ordered = sorted(all_of_it)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        print(f"{name:20} median {statistics.median(ordered):8.1f}  p99 {p99:8.1f}")


if __name__ == "__main__":
    main()
