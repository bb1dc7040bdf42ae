"""The program of `./dev gpu`, run on the stand-in accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu import page
from gpu.__main__ import Plan, run
from gpu.smoke import STEPS, STOPPED, chosen
from mycoll.bench.report import read_results
from worlds import device, warm

ROOT = Path(__file__).resolve().parent.parent

if device.missing("standin", "nccl"):
    pytest.skip(device.missing("standin", "nccl"), allow_module_level=True)


def program(
    folder: Path, *words: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return gpu("--folder", str(folder), *words, environment=environment or {})


def gpu(*words: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    program = warm.start(
        warm.module("gpu"),
        *(*words, "--device", "standin"),
        environment={**os.environ, **environment},
        folder=ROOT,
    )
    out, error = program.communicate(timeout=280)
    return subprocess.CompletedProcess(words, program.returncode or 0, out, error)


def smoke(
    folder: Path, *words: str, nccl: str = ""
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Runs the smoke test; returns the process and its output. nccl: a script of the stand-in."""
    words = ("smoke", "--seconds", "240", "--folder", str(folder), *words)
    done = gpu(*words, environment={"STANDIN_NCCL": nccl})
    return done, done.stdout + done.stderr


@pytest.mark.tools
def test_smoke(tmp_path: Path) -> None:
    done, text = smoke(tmp_path)
    assert done.returncode == 0, text
    assert "12 of 12" in text
    for number, step in enumerate(STEPS, 1):
        line = next(line for line in text.splitlines() if line.startswith(f"{number:2}  "))
        assert step.name in line
        is_tried = step.name != "capture and replay" or torch.__version__ >= "2.12"
        assert ("ok" if is_tried else "--") in line
    assert "the stand-in's times are not those of a GPU" in text
    assert not list(tmp_path.glob("nccl-*")), "NCCL's logs, although nothing failed"


@pytest.mark.tools
def test_a_red_step_has_a_control(tmp_path: Path) -> None:
    done, text = smoke(tmp_path, "--only", "init,messages", nccl="fail=enqueue")
    assert done.returncode == 1, text
    assert "0 of 2" in text
    assert text.count("control: over host memory it passes") == 2
    assert "ncclAllReduce" in text, "the text of the failure"
    assert "ncclAllReduce" in (tmp_path / "02-init.log").read_text()


def test_steps_are_chosen_by_name_or_number() -> None:
    assert chosen("2,ddp,capture") == [2, 5, 8]
    with pytest.raises(SystemExit, match="'13'"):
        chosen("13")


@pytest.mark.tools
def test_smoke_runs_first_and_is_on_the_page(tmp_path: Path) -> None:
    """If nothing works it stops, and nothing else runs."""
    environment = {"STANDIN_NCCL": "version=21000"}
    done = program(tmp_path, environment=environment)
    assert done.returncode == 1
    assert "NCCL 2.10.0" in done.stdout
    assert "0 of 12: the first three steps failed" in done.stdout
    assert "no control: torch's nccl has its own version" in done.stdout
    assert "the rest is left out, because nothing works" in done.stdout
    (page,) = tmp_path.glob("*.md")
    text = page.read_text()
    assert f"smoke: FAILED (exit code {STOPPED})" in text
    assert "library and version" in text
    assert "## tests" not in text
    assert list(tmp_path.glob("*-smoke/01-*.log"))


NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *driver_version*) printf '580.1\\n580.1\\n';;
  *mig.mode*) printf 'Disabled\\nEnabled\\n';;
  topo*) printf '\\tGPU0\\tGPU1\\nGPU0\\t X \\tNV18\\n';;
esac
"""


def test_the_driver_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    (tmp_path / "control").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    page.driver.cache_clear()
    driver, mig, mps, *topology = page.driver()
    page.driver.cache_clear()
    assert (driver, mig) == ("driver 580.1", "MIG: Disabled, Enabled")
    assert mps == f"MPS: a server at {tmp_path}"
    assert topology == ["`\tGPU0\tGPU1`", "`GPU0\t X \tNV18`"]


@pytest.mark.tools
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


@pytest.mark.tools
def test_a_step_that_takes_too_long(tmp_path: Path) -> None:
    """It is ended with all its processes, and the page is still written."""
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    (tmp_path / "job.py").write_text(code)
    # Like torchrun: the rank has its own session, and is ended when the launcher gets SIGTERM.
    (tmp_path / "launcher.py").write_text("""
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
rank = subprocess.Popen([sys.executable, sys.argv[1]], start_new_session=True)
try:
    rank.wait()
finally:
    rank.kill()
    rank.wait()
""")
    launch = [sys.executable, str(tmp_path / "launcher.py"), str(tmp_path / "job.py")]
    plan = Plan("standin", tmp_path, "page", quick=True)
    broken = tmp_path / "rows.jsonl"
    broken.write_text('{"kind": "he')
    run(plan, "endless", launch, 5, broken)
    text = plan.page.read_text()
    assert "endless: STOPPED" in text
    assert "is not a row of `mycoll bench`" in text
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


@pytest.mark.tools
def test_steps_without_time_are_left_out(tmp_path: Path) -> None:
    done = program(tmp_path, "--quick", "--only", "benchmarks", "--seconds", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    (page,) = tmp_path.glob("*.md")
    assert "2 ranks by host: left out" in page.read_text()


@pytest.mark.tools
def test_tests_and_failures(tmp_path: Path) -> None:
    """A failure is named on the page, and its output is kept."""
    done = program(tmp_path, "--only", "tests", "-k", "test_wrong_arguments")
    assert done.returncode == 0, done.stdout + done.stderr
    done = program(tmp_path, "--only", "tests", "-k", "nothing_is_called_so")
    assert done.returncode == 1
    (page,) = tmp_path.glob("*.md")
    assert "FAILED (exit code 5)" in page.read_text()
    assert list(tmp_path.glob("*.log"))
