"""`mycoll demo`, shortened."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    demo = pytest.importorskip("mycoll.demo", reason="the package is not on the path")
    with pytest.raises(SystemExit) as end:
        demo.main(["--ranks", "0"])
    assert end.value.code == 2
    assert "at least 1" in capsys.readouterr().err


def test_demo(request: pytest.FixtureRequest) -> None:
    backend = request.config.getoption("--backend")
    if backend == "mycoll":
        pytest.importorskip("mycoll._C", reason="mycoll is not built", exc_type=ImportError)
    pytest.importorskip("mycoll", reason="the package is not on the path")
    arguments = ["--backend", backend, "--steps", "100", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "mycoll", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    losses = [
        float(line.split("loss")[1].split()[0])
        for line in done.stdout.splitlines()
        if "loss" in line
    ]
    assert losses[-1] < losses[0] - 0.02, done.stdout
    assert "identical to the bit" in done.stdout
    assert "all_reduce      16 MiB" in done.stdout
