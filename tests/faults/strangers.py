"""Connections from outside the job."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import socket
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from worlds.pool import World
from worlds.worker import Ctx

from faults.harness import Outcome, Seen, Skip, Stage, attempt, fates

CONNECTIONS = int(os.environ.get("FAULTS_CONNECTIONS", "10000"))
HELD = 400  # the number of open connections
LISTEN = "0A"
MIB = 1 << 20
MAGIC = b"MYSCOLL1"  # csrc/transport/handshake.h
HELLO_BYTES = 136
WAYS = ("nothing", "half closed", "noise", "half a hello", "a hello", "http", "tls", "reset")


def job(ctx: Ctx, until: str) -> Seen:
    """Keeps the group busy. All ranks do the same number of rounds."""

    def action() -> tuple[int, int, float]:
        wrong, rounds, slowest = 0, 0, 0.0
        is_on = torch.ones(1)
        while is_on.item():
            x = torch.full((3000,), float(ctx.rank + 1))
            began = time.monotonic()
            dist.all_reduce(x)
            slowest = max(slowest, time.monotonic() - began)
            wrong += not bool((x == sum(range(1, ctx.size + 1))).all())
            rounds += 1
            is_on.fill_(not Path(until).exists())
            dist.broadcast(is_on, 0)
            time.sleep(0.01)
        return wrong, rounds, slowest

    return attempt(action)


def listeners(pid: int) -> list[tuple[str, int]]:
    """The addresses at which a process listens for TCP."""
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


@dataclass(frozen=True)
class Resources:
    descriptors: int
    threads: int
    bytes: int


def resources(world: World) -> list[Resources]:
    """The resources of each rank."""
    found = []
    for pid in world.pids:
        process = Path(f"/proc/{pid}")
        pages = int((process / "statm").read_text().split()[1])
        found.append(
            Resources(
                len(list((process / "fd").iterdir())),
                len(list((process / "task").iterdir())),
                pages * os.sysconf("SC_PAGE_SIZE"),
            )
        )
    return found


def send_junk(peer: socket.socket, way: str, chance: random.Random) -> None:
    if way == "half closed":
        peer.shutdown(socket.SHUT_WR)
    elif way == "noise":
        peer.sendall(chance.randbytes(chance.choice((1, 7, 128, 4096, 60_000))))
    elif way == "half a hello":
        peer.sendall(MAGIC + struct.pack("<II", 1, 0))
    elif way == "a hello":
        peer.sendall(MAGIC + struct.pack("<II", 1, 0) + chance.randbytes(HELLO_BYTES - 16))
    elif way == "http":
        peer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    elif way == "tls":
        peer.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(506))
    elif way == "reset":
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def connect_often(addresses: list[tuple[str, int]], count: int, chance: random.Random) -> int:
    """Sends junk of all kinds. Half of the connections stay open for a while. Returns the number of
    connections."""
    held: collections.deque[socket.socket] = collections.deque()
    made = 0
    for i in range(count):
        way = WAYS[i // len(addresses) % len(WAYS)]
        with contextlib.suppress(OSError):  # they may refuse connections
            peer = socket.create_connection(addresses[i % len(addresses)], timeout=5)
            made += 1
            peer.settimeout(0.2)
            if chance.random() < 0.5 and way != "reset":
                held.append(peer)
            with contextlib.suppress(OSError):
                send_junk(peer, way, chance)
            if peer is not (held[-1] if held else None):
                peer.close()
        if len(held) > HELD:
            held.popleft().close()
        if i % 20 == 19:
            time.sleep(0.01)  # for some seconds, rather than in one burst
    for peer in held:
        peer.close()
    return made


def strangers(stage: Stage, connections: int) -> Outcome:
    judge = stage.judge()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, stage.world(2) as world:
        until = Path(folder) / "enough"
        world.start(job, str(until))
        time.sleep(1.0)
        before = resources(world)
        addresses = [address for pid in world.pids for address in listeners(pid)]
        if not addresses:
            raise Skip("nothing listens for TCP in this world")
        judge.expect(
            all(host not in ("0.0.0.0", "::") for host, _ in addresses), "bound to all interfaces"
        )
        began = time.monotonic()
        made = connect_often(addresses, connections, random.Random(stage.seed))
        judge.notes.append(
            f"{made} connections to {len(addresses)} sockets in {time.monotonic() - began:.1f} s"
        )
        judge.expect(made >= 0.99 * connections, f"only {made} connections were made")
        # All connections are closed on this side. The ranks close those that they still have after
        # 5 s.
        end = time.monotonic() + 8 * stage.patience
        after = resources(world)
        while time.monotonic() < end and any(
            new.descriptors > old.descriptors for old, new in zip(before, after, strict=True)
        ):
            time.sleep(0.2)
            after = resources(world)
        for old, new in zip(before, after, strict=True):
            more = new.descriptors - old.descriptors
            judge.expect(more <= 0, f"{more:+} descriptors")
            judge.expect(new.threads <= old.threads, f"{new.threads - old.threads:+} threads")
            grown = (new.bytes - old.bytes) / MIB
            judge.expect(grown <= 4, f"{grown:+.1f} MiB")
        until.touch()
        found = fates(world)
        judge.fine(found)
        for seen in found.values():
            if isinstance(seen, Seen) and seen.value:
                wrong, rounds, slowest = seen.value
                judge.expect(wrong == 0, f"{wrong} wrong sums")
                judge.took("an all_reduce meanwhile", slowest, 1.0)
                judge.expect(rounds > 50, f"only {rounds} rounds")
    return judge.outcome()


def junk(stage: Stage) -> Outcome:
    """10,000 junk connections to the listeners of a running job."""
    return strangers(stage, CONNECTIONS)
