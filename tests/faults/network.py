"""Two hosts (network namespaces) with two ranks each, and a router that can disconnect them.

When the router stops forwarding it drops packets silently. The hosts see no carrier loss and no
ICMP error, as with a failed switch.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from worlds.hosts import enter, ip
from worlds.pool import World
from worlds.worker import Ctx

from faults.deaths import all_reduce_forever
from faults.harness import Judge, Outcome, Seen, Skip, Stage, attempt, attempt_and_leave, fates

PORT = 29_733
NUMEL = 20_000
JOINED = "all have joined"


class Router:
    def __init__(self) -> None:
        self.name = f"mycoll-r-{os.getpid()}"
        self.hosts = [f"mycoll-h{i}-{os.getpid()}" for i in (0, 1)]

    def make(self) -> None:
        for name in (self.name, *self.hosts):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for i, host in enumerate(self.hosts):
            ip("link", "add", "veth0", "netns", host, "type", "veth", "peer", "name", f"port{i}",
               "netns", self.name)  # fmt: skip
            ip("-n", host, "addr", "add", f"10.214.{i}.1/24", "dev", "veth0")
            ip("-n", self.name, "addr", "add", f"10.214.{i}.254/24", "dev", f"port{i}")
            ip("-n", self.name, "link", "set", f"port{i}", "up")
            ip("-n", host, "link", "set", "veth0", "up")
            ip("-n", host, "route", "add", "default", "via", f"10.214.{i}.254")
        self.forward(True)

    def inside(self, *words: str) -> None:
        subprocess.run(
            ["ip", "netns", "exec", self.name, *words], check=True, capture_output=True, text=True
        )

    def forward(self, is_open: bool) -> None:
        self.inside("sh", "-c", f"echo {int(is_open)} > /proc/sys/net/ipv4/ip_forward")

    def slow(self) -> None:
        for port in ("port0", "port1"):
            self.inside("tc", "qdisc", "replace", "dev", port, "root", "tbf", "rate", "100mbit",
                        "burst", "64kb", "latency", "50ms")  # fmt: skip

    def lossy(self) -> bool:
        """Returns False if the kernel has no netem."""
        try:
            for port in ("port0", "port1"):
                self.inside("tc", "qdisc", "replace", "dev", port, "root", "netem", "loss", "1%",
                            "rate", "100mbit")  # fmt: skip
        except subprocess.CalledProcessError:
            return False
        return True

    def remove(self) -> None:
        for name in (self.name, *self.hosts):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextlib.contextmanager
def router(stage: Stage) -> Iterator[Router]:
    if stage.transport == "shm":
        raise Skip("shared memory does not reach another host")
    made = Router()
    try:
        try:
            made.make()
        except (OSError, subprocess.CalledProcessError) as error:
            text = getattr(error, "stderr", "") or str(error)
            raise Skip(f"network namespaces cannot be made here: {text.strip()}") from error
        yield made
    finally:
        made.remove()


def join(ctx: Ctx, hosts: list[str], timeout: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "veth0"
    os.environ.pop("MYCOLL_TRANSPORT", None)  # the default: shared memory within a host
    meet(ctx, hosts[ctx.rank // 2], PORT, timeout)


def meet(ctx: Ctx, host: str, port: int, timeout: float) -> None:
    enter(host)
    dist.init_process_group(
        ctx.backend,
        init_method=f"tcp://10.214.0.1:{port}",
        rank=ctx.rank,
        world_size=ctx.size,
        timeout=timedelta(seconds=timeout),
    )
    dist.all_reduce(torch.ones(NUMEL))
    print(JOINED, flush=True)


def wait_until_joined(world: World) -> None:
    end = time.monotonic() + 40
    while time.monotonic() < end:
        if all(JOINED in member.log_tail() for member in world.members):
            time.sleep(0.5)
            return
        time.sleep(0.1)
    raise Skip("the ranks could not connect over the router")


def loop(ctx: Ctx, hosts: list[str], timeout: float) -> Seen:
    join(ctx, hosts, timeout)
    return attempt_and_leave(lambda: all_reduce_forever(0.01))


def rounds(ctx: Ctx, hosts: list[str], seconds: float) -> Seen:
    """All ranks do the same number of rounds. Returns how many were wrong, and their number."""
    join(ctx, hosts, 60.0)
    inputs = [ctx.inputs(torch.float32, NUMEL, seed) for seed in range(4)]
    wants = [(a + b) + (c + d) for a, b, c, d in inputs]

    def action() -> tuple[int, int]:
        wrong, done, end = 0, 0, time.monotonic() + seconds
        is_on = torch.ones(1)
        while is_on.item():
            x = inputs[done % 4][ctx.rank].clone()
            dist.all_reduce(x)
            want = wants[done % 4]
            if ctx.gloo:  # adds in another order
                right = float((x - want).abs().max()) <= 1e-5 * float(want.abs().max())
            else:
                right = torch.equal(x, want)
            wrong += not right
            done += 1
            time.sleep(0.01)
            is_on.fill_(time.monotonic() < end)
            dist.broadcast(is_on, 0)
        return wrong, done

    return attempt(action)


def blackhole(stage: Stage) -> Outcome:
    """The network between two hosts drops everything, timeout 20 s."""
    judge = stage.judge()
    with router(stage) as net, stage.world(4, init=False) as world:
        world.start(loop, net.hosts, 20.0)
        wait_until_joined(world)
        net.forward(False)
        cut = time.monotonic()
        judge.raised(fates(world), cut, 12.0, r"rank \d")
    return judge.outcome()


def partition(stage: Stage) -> Outcome:
    """The network is cut for 3 s and heals."""
    judge = stage.judge()
    with router(stage) as net, stage.world(4, init=False) as world:
        world.start(rounds, net.hosts, 6.0)
        wait_until_joined(world)
        net.forward(False)
        time.sleep(3.0)
        net.forward(True)
        _finish(judge, fates(world))
    return judge.outcome()


def slow_and_lossy(stage: Stage) -> Outcome:
    """100 Mbit/s, and 1 % loss where the kernel has netem, for 10 s."""
    judge = stage.judge()
    with router(stage) as net, stage.world(4, init=False) as world:
        if not net.lossy():
            net.slow()
            judge.notes.append("100 Mbit/s only: this kernel has no netem for the loss")
        world.start(rounds, net.hosts, 10.0)
        _finish(judge, fates(world, limit=60))
    return judge.outcome()


def _finish(judge: Judge, found: dict[int, Any]) -> None:
    judge.fine(found)
    values = [s.value for s in found.values() if isinstance(s, Seen) and s.value]
    wrong = sum(value[0] for value in values)
    judge.expect(wrong == 0, f"{wrong} wrong results")
    judge.notes.append(f"{max((value[1] for value in values), default=0)} rounds")
