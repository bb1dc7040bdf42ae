"""`mycoll demo`, shortened."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from worlds import warm


@pytest.mark.parametrize("option", ["--ranks", "--steps", "--rounds"])
def test_counts_must_be_positive(capsys: pytest.CaptureFixture[str], option: str) -> None:
    demo = pytest.importorskip("mycoll.demo", reason="the package is not on the path")
    with pytest.raises(SystemExit) as end:
        demo.main([option, "0"])
    assert end.value.code == 2
    assert "at least 1" in capsys.readouterr().err


@pytest.mark.tools
def test_demo(request: pytest.FixtureRequest) -> None:
    backend = request.config.getoption("--backend")
    if backend == "mycoll":
        pytest.importorskip("mycoll._C", reason="mycoll is not built", exc_type=ImportError)
    pytest.importorskip("mycoll", reason="the package is not on the path")
    arguments = ["--backend", backend, "--steps", "100", "--rounds", "1"]
    done = warm.run_module("mycoll", "demo", *arguments, timeout=200)
    assert done.returncode == 0, done.stderr
    losses = [
        float(line.split("loss")[1].split()[0])
        for line in done.stdout.splitlines()
        if "loss" in line
    ]
    assert losses[-1] < losses[0] - 0.02, done.stdout
    assert "identical to the bit" in done.stdout
    assert "# all_reduce, float32 sum, 2 ranks" in done.stdout
    assert "wrong elements: 0" in done.stdout


@pytest.mark.tools
def test_closed_output() -> None:
    """As in `mycoll demo | head -1`: it ends promptly, without a traceback."""
    pytest.importorskip("mycoll._C", reason="mycoll is not built", exc_type=ImportError)
    run = [sys.executable, "-m", "mycoll", "demo", "--steps", "1000000"]
    process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    assert "Training on 2 ranks" in process.stdout.readline()
    process.stdout.close()
    assert process.wait(100) == 128 + signal.SIGPIPE
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
