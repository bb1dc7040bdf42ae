"""torchrun's restarts and changes of membership."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from worlds import warm

PROGRAM = str(Path(__file__).parent / "worlds" / "elastic.py")
DEADLINE = 120


@pytest.fixture(autouse=True)
def only_mycoll(backend):
    if backend != "mycoll":
        pytest.skip("gloo reads addresses of dead processes from the store")


def torchrun(*arguments: str, transport: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MYCOLL_TRANSPORT": transport}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1", *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kill(agent: subprocess.Popen[str]) -> str:
    """Kills the agent and its workers, which end with it; returns their output."""
    agent.kill()
    return agent.communicate()[0]


def finished(agent: subprocess.Popen[str]) -> str:
    try:
        output = agent.communicate(timeout=DEADLINE)[0]
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running after {DEADLINE} s:\n{kill(agent)}")
    assert agent.returncode == 0, output
    return output


FAILURES = 4  # one for each way to fail


def check_restarts(output: str) -> None:
    done = set(re.findall(r"rank (\d) done in attempt (\d)", output))
    assert done == {("0", str(FAILURES)), ("1", str(FAILURES))}, output


@pytest.mark.tools
@pytest.mark.transports("shm")
def test_restarts(transport):
    """One of two workers dies."""
    check_restarts(
        finished(
            torchrun(
                "--standalone", "--nproc-per-node", "2", "--max-restarts", str(FAILURES),
                PROGRAM, "restarts", "mycoll", str(FAILURES), transport=transport,
            )
        )
    )  # fmt: skip


@pytest.mark.transports("tcp")
def test_restarts_of_forked_workers(transport):
    done = warm.run_module(
        "worlds.agent",
        *(str(FAILURES), PROGRAM, "restarts", "mycoll", str(FAILURES)),
        environment={**os.environ, "OMP_NUM_THREADS": "1", "MYCOLL_TRANSPORT": transport},
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_restarts(done.stdout)


def wait_for(path: Path, agents: list[subprocess.Popen[str]]) -> None:
    end = time.monotonic() + DEADLINE
    while not path.exists():
        if time.monotonic() > end or any(agent.poll() is not None for agent in agents):
            pytest.fail(f"{path.name} was not made\n" + "\n".join(map(kill, agents)))
        time.sleep(0.05)


def wait_for_port(port: int, agent: subprocess.Popen[str]) -> None:
    end = time.monotonic() + DEADLINE / 2
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > end or agent.poll() is not None:
            pytest.fail(f"no store at port {port}\n{kill(agent)}")
        time.sleep(0.05)


@pytest.mark.tools
def test_a_node_dies(tmp_path: Path, free_port: int):
    """--nnodes=1:2: of two nodes, one dies with its workers, and the other continues alone."""
    command = (
        "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9",
        "--rdzv-backend", "c10d", "--rdzv-id", "elastic",
        "--rdzv-endpoint", f"127.0.0.1:{free_port}",
        "--rdzv-conf", "last_call_timeout=8,keep_alive_max_attempt=2",
        PROGRAM, "members", "mycoll", str(tmp_path),
    )  # fmt: skip
    first = torchrun(*command, transport="auto")  # holds the agents' store
    wait_for_port(free_port, first)
    second = torchrun(*command, transport="auto")
    wait_for(tmp_path / "world2", [first, second])
    # It may exist already, if the second node started after the first one stopped waiting for it.
    (tmp_path / "world1").unlink(missing_ok=True)
    kill(second)
    wait_for(tmp_path / "world1", [first])
    (tmp_path / "end").touch()
    finished(first)
