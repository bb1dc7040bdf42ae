"""Programs that are started as users start them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# A launcher sets the rank and the address of the store; the transport does not matter.
pytestmark = [pytest.mark.transports("shm"), pytest.mark.tools]

SMOKE = str(Path(__file__).parent / "worlds" / "smoke.py")
DEADLINE = 120


def start(*command: str, transport: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if transport:
        env["MYCOLL_TRANSPORT"] = transport
    return subprocess.Popen(
        [sys.executable, *command],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(*processes: subprocess.Popen[str]) -> list[str]:
    """Returns the outputs; fails with all of them if a process fails or hangs."""
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=DEADLINE)[0])
        except subprocess.TimeoutExpired:
            for p in processes:
                if p.poll() is None:
                    os.killpg(p.pid, signal.SIGKILL)
            pytest.fail(
                f"still running after {DEADLINE} s: {process.args}\n{process.communicate()[0]}"
            )
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, f"{process.args}: {process.returncode}\n{output}"
    return outputs


def oks(outputs: list[str]) -> set[str]:
    # Two ranks may write on one line.
    return set(re.findall(r"smoke: ok (\w+(?: of \d+)?)", "\n".join(outputs)))


def test_torchrun(backend, transport, free_port):
    """Two agents, one of them with torchrun's former name. test_elastic.py and test_examples.py
    test a single agent."""
    words = (
        "--nnodes", "2", "--nproc-per-node", "2",
        "--rdzv-backend", "c10d", "--rdzv-id", "two", "--rdzv-endpoint", f"127.0.0.1:{free_port}",
        SMOKE, backend,
    )  # fmt: skip
    outputs = finish(
        start("-m", "torch.distributed.run", *words, transport=transport),
        start("-m", "torch.distributed.launch", "--use-env", *words, transport=transport),
    )
    assert oks(outputs) == {f"{r} of 4" for r in range(4)}, outputs


def test_multiprocessing_spawn(backend, transport, tmp_path):
    url = f"file://{tmp_path}/rendezvous"  # a port could be taken by another process
    outputs = finish(start(SMOKE, "spawn", backend, url, transport=transport))
    assert oks(outputs) == {"spawn"}, outputs
