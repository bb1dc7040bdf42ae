"""Connections from outside the job."""

from __future__ import annotations

import os
import random
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
from worlds.pool import World
from worlds.worker import Ctx

from faults.harness import Outcome, Seen, Skip, Stage, answers, attempt

CONNECTIONS = 1000
LISTEN = "0A"
MIB = 1 << 20


def job(ctx: Ctx, seconds: float) -> Seen:
    """Keeps the group in use; every rank does the same number of rounds."""
    groups = [dist.new_group([0, 1, 2, 3])]

    def action() -> int:
        wrong = 0
        end = time.monotonic() + seconds
        go_on = torch.ones(1)
        while go_on.item():
            x = torch.full((3000,), float(ctx.rank))
            dist.all_reduce(x, group=groups[0])
            wrong += not bool((x == 6.0).all())
            go_on.fill_(time.monotonic() < end)
            dist.broadcast(go_on, 0)
            time.sleep(0.01)
        return wrong

    return attempt(action)


def listeners(pid: int) -> list[tuple[str, int]]:
    """Addresses at which a process listens for TCP."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(fd.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] != LISTEN or words[9] not in inodes:
                continue
            host, port = words[1].split(":")
            raw = b"".join(bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8))
            found.append((socket.inet_ntop(family, raw), int(port, 16)))
    return found


def resources(world: World) -> list[tuple[int, int]]:
    """Descriptors and resident bytes of each rank."""
    found = []
    for pid in world.pids:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        found.append((fds, pages * os.sysconf("SC_PAGE_SIZE")))
    return found


def pester(address: tuple[str, int], count: int, chance: random.Random) -> list[socket.socket]:
    """Junk of many lengths; half of the connections stay open."""
    held = []
    for i in range(count):
        try:
            peer = socket.create_connection(address, timeout=2)
        except OSError:
            continue
        peer.settimeout(0.2)
        try:
            length = chance.choice((0, 1, 7, 64, 128, 4096))
            head = chance.choice((b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 8))
            peer.sendall(head + chance.randbytes(length))
        except OSError:
            pass
        if i % 2:
            held.append(peer)
        else:
            peer.close()
        if i % 20 == 19:
            time.sleep(0.01)
    return held


def junk(stage: Stage) -> Outcome:
    """1,000 junk connections to a listener, half of them left open."""
    judge = stage.judge()
    with stage.world(4) as world:
        world.start(job, 13.0)
        time.sleep(1.5)
        before = resources(world)
        addresses = listeners(world.pids[0])
        if not addresses:
            raise Skip("nothing listens for TCP in this world")
        judge.notes.append(f"{len(addresses)} listening TCP socket(s)")
        judge.expect(
            all(host not in ("0.0.0.0", "::") for host, _ in addresses), "bound to all interfaces"
        )
        began = time.monotonic()
        held = []
        for address in addresses:
            held += pester(address, CONNECTIONS // len(addresses), random.Random(stage.seed))
        judge.notes.append(f"sent within {time.monotonic() - began:.1f} s")
        time.sleep(max(0.0, 9.5 - (time.monotonic() - began)))
        for (fds, size), (fds_now, size_now) in zip(before, resources(world), strict=True):
            judge.expect(abs(fds_now - fds) <= 5, f"{fds_now - fds:+} descriptors")
            judge.expect(size_now - size <= 10 * MIB, f"{(size_now - size) / MIB:+.0f} MiB")
        found = answers(world)
        judge.fine(found)
        judge.expect(not any(s.value for s in found.values() if isinstance(s, Seen)), "wrong sums")
        for peer in held:
            peer.close()
    return judge.outcome()
