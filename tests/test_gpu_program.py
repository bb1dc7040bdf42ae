"""The program behind `./dev gpu`, tried on the stand-in accelerator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mycoll.bench.report import read_results
from worlds import device

ROOT = Path(__file__).resolve().parent.parent

if device.missing("standin", "nccl"):
    pytest.skip(device.missing("standin", "nccl"), allow_module_level=True)


def program(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpu", "--device", "standin", "--folder", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)


def test_benchmarks_and_page(tmp_path: Path) -> None:
    run = program(tmp_path, "--quick", "--only", "benchmarks")
    assert run.returncode == 0, run.stdout + run.stderr
    (page,) = tmp_path.glob("*.md")
    text = page.read_text()
    assert "the stand-in device" in text
    for name in ("1 ranks by nccl", "2 ranks by nccl", "2 ranks by host"):
        assert f"benchmark, {name}: passed" in text
    for file in tmp_path.glob("*.jsonl"):
        assert all(row.wrong == 0 for row in read_results(str(file))[1])
    assert "| all_reduce | 8 |" in text


def test_tests_and_failures(tmp_path: Path) -> None:
    """What fails is named on the page, and its output kept."""
    run = program(tmp_path, "--only", "tests", "-k", "test_wrong_arguments")
    assert run.returncode == 0, run.stdout + run.stderr
    run = program(tmp_path, "--only", "tests", "-k", "nothing_is_called_so")
    assert run.returncode == 1
    (page,) = tmp_path.glob("*.md")
    assert "FAILED (exit code 5)" in page.read_text()
    assert list(tmp_path.glob("*.log"))
