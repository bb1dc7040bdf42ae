"""If a replica of torchft dies during a step, the others repeat this step, and no other one. Run by
`./dev test --clients`, also with torchft's nightly if that is installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import IO

import pytest
import torch.distributed as dist

PROGRAM = Path(__file__).resolve().parent / "torchft_replica.py"
STEPS, REPLICAS, LOST, VICTIM = 5, 3, 2, 2  # as in the program
DEADLINE = 240


def is_installed(library: str) -> bool:
    return any(metadata.distributions(name=library))


@pytest.mark.parametrize("group", ["adapter", "native"])
@pytest.mark.parametrize("program", ["ddp", "diloco"])
def test_only_the_step_that_loses_a_replica_is_repeated(
    backend: str, tmp_path: Path, program: str, group: str
) -> None:
    if backend != "mycoll":
        pytest.skip("the program names mycoll")
    if not is_installed("torchft") and not is_installed("torchft-nightly"):
        pytest.skip("torchft is not installed: ./dev test --clients")
    if group == "native" and not is_installed("torchft-nightly"):
        pytest.skip("the released torchft does not support groups with reconfigure()")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    replicas: list[tuple[subprocess.Popen[str], IO[str]]] = []
    try:
        for number in range(REPLICAS):
            log = (tmp_path / f"replica{number}").open("w+")
            arguments = (program, group, str(number), str(store.port))
            started = subprocess.Popen(
                [sys.executable, str(PROGRAM), *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
            replicas.append((started, log))
        codes = [started.wait(DEADLINE) for started, _ in replicas]
    finally:
        for started, _ in replicas:
            started.kill()
            started.wait()
    outputs = []
    for _, log in replicas:
        log.seek(0)
        outputs.append(log.read())
        log.close()
    survivors = [number for number in range(REPLICAS) if number != VICTIM]
    assert codes[VICTIM] == -9, outputs[VICTIM][-6000:]
    for number in survivors:
        assert codes[number] == 0, outputs[number][-6000:]
        found = re.search(r"attempts: (.*)", outputs[number])
        assert found, outputs[number][-6000:]
        attempts = [tuple(each) for each in json.loads(found[1])]
        print(f"replica {number}: {attempts}")
        before = [(step, True, REPLICAS) for step in range(LOST)]
        after = [(step, True, REPLICAS - 1) for step in range(LOST, STEPS)]
        assert attempts == [*before, (LOST, False, REPLICAS), *after]
