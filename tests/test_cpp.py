"""Runs the engine's C++ tests, which ./dev builds and names in CPP_TEST_DIR."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

# These take 5 to 20 s, the others little. They are begun first.
LONG = ["engine_test", "deadlock_test", "leaving_test", "meeting_test", "handshake_fuzz_test"]
LONG += ["reduce_test", "transport_test"]
SOURCES = Path(__file__).resolve().parent.glob("cpp/*_test.cpp")
SHORT = sorted({source.stem for source in SOURCES} - set(LONG))


@pytest.mark.parametrize(
    "name", [*LONG, *(pytest.param(name, marks=pytest.mark.quick) for name in SHORT)]
)
def test_cpp(name: str) -> None:
    folder = os.environ.get("CPP_TEST_DIR")
    if not folder:
        pytest.skip("CPP_TEST_DIR is not set; ./dev test builds the C++ tests and sets it")
    program = Path(folder) / name
    if not program.exists():
        pytest.fail(f"{program} was not built")
    run = subprocess.run([program], capture_output=True, text=True, errors="replace", timeout=240)
    assert run.returncode == 0, f"{run.stderr[-6000:]}\n{run.stdout[-6000:]}"
