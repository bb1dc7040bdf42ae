"""NVIDIA's own NCCL on a machine without a GPU: that of a CUDA build of torch, or one that `./dev
nccl` fetched. It is loaded once and returns its version and ids. Making a communicator fails with a
clear error because there is no device, leaks nothing, and the process exits normally."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from worlds.nccl_packages import packages, version_of

if torch.cuda.is_available():
    pytest.skip("there is a GPU: ./dev gpu runs NCCL on it", allow_module_level=True)

FOUND = [place for place in packages() if (place / "nvidia/nccl/lib/libnccl.so.2").is_file()]
ABSENT = "no libnccl.so.2 here: a CUDA build of torch has one, `./dev nccl` fetches one"
needs_cuda_torch = pytest.mark.skipif(
    torch.version.cuda is None, reason="this torch is built without CUDA, so it has no NCCL"
)


@pytest.mark.skipif(not FOUND, reason=ABSENT)
@pytest.mark.parametrize("place", FOUND, ids=version_of)
def test_without_a_gpu(place: Path) -> None:
    """The C++ tests: version, ids, and communicators that cannot be made."""
    folder = os.environ.get("CPP_TEST_DIR")
    if not folder:
        pytest.skip("CPP_TEST_DIR is not set; ./dev test builds the C++ tests and sets it")
    library = place / "nvidia/nccl/lib/libnccl.so.2"
    done = subprocess.run(
        [Path(folder) / "real_nccl_test"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "REAL_NCCL": str(library)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed, 0 failed, 0 skipped" in done.stdout
    assert f"NCCL {version_of(place)} ({library})" in done.stdout


def finished(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


ONCE = """
import pathlib, torch

def copies():
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in maps if "libnccl.so" in line})

before = copies()
from mycoll import _C
from mycoll._native import nccl_wheel
_C.set_nccl_wheel(nccl_wheel())
_C._require_nccl_memory()
assert copies() == before, (before, copies())
print(*before)
"""


@needs_cuda_torch
def test_only_torchs_copy_is_used() -> None:
    """torch may have loaded its NCCL, or have it beside it in the wheel."""
    files = finished(ONCE).split()
    assert len(files) <= 1, files


DOCTOR = "from mycoll.doctor import check_nccl\nfor each in check_nccl(): print(each.text)"


@needs_cuda_torch
def test_the_doctor_names_the_library() -> None:
    assert re.search(r"2\.\d+\.\d+, \S*libnccl\.so\.2", finished(DOCTOR))


CPU_TENSORS = """
import torch, torch.distributed as dist
dist.init_process_group("mycoll", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(3)
dist.all_reduce(x)
dist.destroy_process_group()
print("done")
"""


@needs_cuda_torch
def test_cpu_tensors_need_no_gpu() -> None:
    assert finished(CPU_TENSORS) == "done\n"
