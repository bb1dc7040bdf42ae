"""A network that drops all packets is an error after MYCOLL_NETWORK_SECONDS."""

from __future__ import annotations

import os

import pytest
from faults.deaths import all_reduce_forever
from faults.harness import Seen, Skip, Stage, answers, attempt_and_leave
from faults.network import meet, router, wait_until_joined
from worlds.pool import World
from worlds.worker import Ctx

TIMEOUT = 13.0
# Values above and below the default of 10 s and the group's timeout: the error shows which limit
# was reached. The text of the network's error contains "Connection timed out".
CASES = (
    ("3", "0", "timed out after", False),
    ("60", "0", "timed out after", True),
    ("3", "1", "timed out after", False),  # with encryption
)


def cut_off(ctx: Ctx, hosts: list[str], port: int) -> Seen:
    meet(ctx, hosts[ctx.rank], port, TIMEOUT)
    return attempt_and_leave(lambda: all_reduce_forever(0.01))


def test_network_seconds_bounds_a_silent_network(pool, backend, tmp_path):
    if backend != "mycoll":
        pytest.skip("gloo waits forever")
    stage = Stage(pool, "tcp")
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))

    def start(seconds: str, encrypt: str) -> World:
        env = {
            "MYCOLL_NETWORK_SECONDS": seconds,
            "MYCOLL_ENCRYPT": encrypt,
            "MYCOLL_SECRET_FILE": str(secret),
        }
        return pool.fresh(pool.spec(2, "tcp", init=False, env=env))

    try:
        with router(stage) as net:
            worlds = [start(seconds, encrypt) for seconds, encrypt, _, _ in CASES]
            try:
                for i, world in enumerate(worlds):
                    world.start(cut_off, net.hosts, 29_740 + i)
                for world in worlds:
                    wait_until_joined(world)
                net.forward(False)
                found = [answers(world) for world in worlds]
            finally:
                for world in worlds:
                    world.kill()
    except Skip as reason:
        pytest.skip(str(reason))
    for (seconds, _, word, is_there), seen in zip(CASES, found, strict=True):
        for one in seen.values():
            assert isinstance(one, Seen) and one.kind == "DistBackendError", (seconds, one)
            assert (word in one.text) == is_there, (seconds, one.text)
