"""The program behind `./dev gpu`, tried on the stand-in accelerator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gpu.__main__ import Plan, run
from mycoll.bench.report import read_results
from worlds import device

ROOT = Path(__file__).resolve().parent.parent

if device.missing("standin", "nccl"):
    pytest.skip(device.missing("standin", "nccl"), allow_module_level=True)


def program(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpu", "--device", "standin", "--folder", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)


def test_benchmarks_and_page(tmp_path: Path) -> None:
    done = program(tmp_path, "--quick", "--only", "benchmarks")
    assert done.returncode == 0, done.stdout + done.stderr
    (page,) = tmp_path.glob("*.md")
    text = page.read_text()
    assert "the stand-in device" in text
    for name in ("1 ranks by nccl", "2 ranks by nccl", "2 ranks by host"):
        assert f"benchmark, {name}: passed" in text
    for file in tmp_path.glob("*.jsonl"):
        assert all(row.wrong == 0 for row in read_results(str(file))[1])
    assert "| all_reduce | 8 |" in text


def test_a_step_that_takes_too_long(tmp_path: Path) -> None:
    """It is ended with all its processes, and the page written all the same."""
    told = tmp_path / "pid"
    code = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    (tmp_path / "job.py").write_text(code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    plan = Plan("standin", tmp_path, "page", quick=True)
    broken = tmp_path / "rows.jsonl"
    broken.write_text('{"kind": "he')
    run(plan, "endless", [*torchrun, str(tmp_path / "job.py")], 15, broken)
    text = plan.page.read_text()
    assert "endless: STOPPED" in text
    assert "is not a row of `mycoll bench`" in text
    assert not Path(f"/proc/{told.read_text()}").exists()


def test_what_there_is_no_time_for(tmp_path: Path) -> None:
    done = program(tmp_path, "--quick", "--only", "benchmarks", "--seconds", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    (page,) = tmp_path.glob("*.md")
    assert "2 ranks by host: left out" in page.read_text()


def test_tests_and_failures(tmp_path: Path) -> None:
    """What fails is named on the page, and its output kept."""
    done = program(tmp_path, "--only", "tests", "-k", "test_wrong_arguments")
    assert done.returncode == 0, done.stdout + done.stderr
    done = program(tmp_path, "--only", "tests", "-k", "nothing_is_called_so")
    assert done.returncode == 1
    (page,) = tmp_path.glob("*.md")
    assert "FAILED (exit code 5)" in page.read_text()
    assert list(tmp_path.glob("*.log"))
