"""Runs the engine's C++ tests, which ./dev builds into CPP_TEST_DIR."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

# These take 5 to 60 s each and are started first.
LONG = ["formation_test", "leaving_test", "simulation_test", "endpoint_test", "hosts_test"]
LONG += ["plan_test", "many_test", "engine_test", "deadlock_test", "transport_test"]
LONG += ["external_test", "reduce_test", "handshake_fuzz_test"]
SOURCES = Path(__file__).resolve().parent.glob("cpp/*_test.cpp")
SHORT = sorted({source.stem for source in SOURCES} - set(LONG))


ALL_SKIPPED, BAD_USE = 77, 2  # exit codes: cpp/main.cpp


def run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    folder = os.environ.get("CPP_TEST_DIR")
    if not folder:
        pytest.skip("CPP_TEST_DIR is not set; ./dev test builds the C++ tests and sets it")
    program = Path(folder) / name
    if not program.exists():
        pytest.fail(f"{program} was not built")
    return subprocess.run(
        [program, *words], capture_output=True, text=True, errors="replace", timeout=240
    )


@pytest.mark.parametrize(
    "name", [*LONG, *(pytest.param(name, marks=pytest.mark.quick) for name in SHORT)]
)
def test_cpp(name: str) -> None:
    done = run(name)
    if done.returncode == ALL_SKIPPED:
        reasons = re.findall(r"^skipped .*?: (.*)", done.stdout, re.MULTILINE)
        pytest.skip("; ".join(dict.fromkeys(reasons)))
    assert done.returncode == 0, f"{done.stderr[-6000:]}\n{done.stdout[-6000:]}"


@pytest.mark.quick
def test_a_word_that_selects_no_test() -> None:
    """It is an error even if another word selects some."""
    done = run("sha256_test", "Sha256", "NoSuchTest")
    assert done.returncode == BAD_USE, done.stdout
    assert "no test has 'NoSuchTest' in its name" in done.stderr
    assert "passed" not in done.stdout
    assert run("sha256_test", "Sha256").returncode == 0


@pytest.mark.quick
def test_a_program_whose_tests_are_all_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REAL_NCCL", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"REAL_NCCL names no libnccl\.so\.2"):
        test_cpp("real_nccl_test")
