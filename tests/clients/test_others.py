"""Unchanged tests of other projects, from their wheels. Those that pass over gloo must pass if
mycoll replaces gloo. `./dev test --clients`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
DEADLINE = 280
# pytest without this project's settings and conftest.
PLAIN = ("-q", "-rA", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, "--rootdir", ".")
# Tests that cannot pass, and why.
KNOWN = {
    "test_ddp_logging_data_cpu": "DDP logs the number of gloo's threads, and there are none",
}


def environment(replace: str) -> dict[str, str]:
    return {
        **os.environ,
        "MYCOLL_REPLACE": replace,
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",  # the names of parametrized tests depend on it
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
    }


def run(replace: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python, with gloo replaced or not."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(replace),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )


def passed(replace: str, folder: Path, *arguments: str) -> set[str]:
    """Runs pytest, with gloo replaced or not. Returns the names of the tests that pass."""
    done = run(replace, folder, "-m", "pytest", *PLAIN, *arguments)
    found = set(re.findall(r"^PASSED .*::(\S+)$", done.stdout, re.MULTILINE))
    assert found, done.stdout[-3000:]
    return found


@pytest.mark.tools
def test_gloo_is_replaced(tmp_path: Path) -> None:
    """Otherwise the other tests would compare gloo with itself."""
    program = "import sys, torch.distributed; print('mycoll.replace' in sys.modules)"
    for replace, answer in (("", "False"), ("gloo", "True")):
        assert run(replace, tmp_path, "-c", program).stdout.split()[-1] == answer


def need(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: ./dev test --clients")


def compare(folder: Path, *arguments: str) -> None:
    over_gloo, over_mycoll = (passed(replace, folder, *arguments) for replace in ("", "gloo"))
    print(f"{len(over_gloo)} pass over gloo, {len(over_mycoll)} over mycoll")
    assert over_gloo - over_mycoll <= set(KNOWN), over_gloo - over_mycoll - set(KNOWN)


@pytest.mark.timeout(2 * DEADLINE)
def test_torch(tmp_path: Path) -> None:
    need("expecttest")
    compare(tmp_path, str(FOLDER / "torch_suite.py"))


@pytest.mark.timeout(2 * DEADLINE)
def test_torchft(tmp_path: Path) -> None:
    """Without torchft's groups in child processes, which time out over gloo on a busy machine."""
    need("torchft")
    spec = importlib.util.find_spec("torchft.process_group_test")
    assert spec is not None and spec.origin is not None
    compare(tmp_path, spec.origin, "-k", "not Baby and not baby")


@pytest.mark.parametrize("script", ["test_script", "test_ops", "test_sync"])
def test_accelerate(tmp_path: Path, script: str) -> None:
    need("accelerate")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for replace in ("", "gloo"):
        done = run(replace, tmp_path, *launch, "-m", f"accelerate.test_utils.scripts.{script}")
        assert done.returncode == 0, f"MYCOLL_REPLACE={replace}\n{done.stdout[-3000:]}"
