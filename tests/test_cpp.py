"""Runs the engine's C++ tests, which ./dev builds and names in CPP_TEST_DIR."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).resolve().parent / "cpp").glob("*_test.cpp"))


@pytest.mark.parametrize("name", [source.stem for source in SOURCES])
def test_cpp(name: str) -> None:
    folder = os.environ.get("CPP_TEST_DIR")
    if not folder:
        pytest.skip("CPP_TEST_DIR is not set; ./dev test builds the C++ tests and sets it")
    program = Path(folder) / name
    if not program.exists():
        pytest.fail(f"{program} was not built")
    run = subprocess.run([program], capture_output=True, text=True, errors="replace", timeout=240)
    assert run.returncode == 0, f"{run.stderr[-6000:]}\n{run.stdout[-6000:]}"
