"""Compares csrc/nccl/abi.h and the loader with NVIDIA's nccl.h and libnccl.so.2, and the stand-in
for CUDA's runtime with NVIDIA's headers.

Neither is part of mycoll. They are searched beside the installed torch (a CUDA build has both), in
NCCL_PACKAGES (a folder such as site-packages), and in build/nccl, which `./dev nccl` fills.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from worlds.nccl_packages import ROOT, packages, version_of

# The folders in NVIDIA's packages with the CUDA headers that nccl.h includes, for CUDA 13 and 12.
CUDA = ["cu13", "cuda_runtime", "cuda_nvcc", "cuda_cccl"]
ABSENT = "no nccl.h here: a CUDA build of torch has one, `./dev nccl` fetches one"

FOUND = packages() or [
    pytest.param(None, marks=pytest.mark.skip(reason=ABSENT), id="absent"),
]


def label(place: Path | None) -> str | None:
    return version_of(place) if place else None


def cuda_headers(place: Path) -> list[Path]:
    """The headers of the same packages if they are complete, else of fetched ones."""
    for root in [place, *(ROOT / "build/nccl").glob("*")]:
        folders = [root / "nvidia" / name / "include" for name in CUDA]
        needed = ["cuda_runtime.h", "crt/host_config.h", "nv/target"]
        if all(any((folder / name).is_file() for folder in folders) for name in needed):
            return folders
    pytest.skip(f"{place} lacks CUDA headers that nccl.h includes; `./dev nccl` fetches them")


def compile_against(
    place: Path, ours: Path, source: str = "nccl_abi.cpp"
) -> subprocess.CompletedProcess[str]:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if not compiler:
        pytest.skip("there is no C++ compiler")
    folders = [place / "nvidia/nccl/include", *cuda_headers(place)]
    includes = [f"-isystem{folder}" for folder in folders if folder.is_dir()]
    return subprocess.run(
        [
            compiler,
            "-std=c++20",
            "-fsyntax-only",
            f"-I{ours}",
            *includes,
            ROOT / "tests/abi" / source,
        ],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("place", FOUND, ids=label)
def test_declarations(place: Path) -> None:
    run = compile_against(place, ROOT / "csrc")
    assert run.returncode == 0, run.stderr[-6000:]


@pytest.mark.parametrize("place", FOUND, ids=label)
def test_standin_for_cuda(place: Path) -> None:
    if not any(folder.parent.name == "cu13" for folder in cuda_headers(place) if folder.is_dir()):
        pytest.skip("no headers of CUDA 13 here: `./dev nccl 13` fetches them")
    run = compile_against(place, ROOT / "tests/standins/cuda", "cuda_abi.cpp")
    assert run.returncode == 0, run.stderr[-6000:]


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("kMax = 2, kMin = 3", "kMax = 3, kMin = 2", "ncclMax"),
        ("const char* netName", "int netName", "ncclConfig_t.netName"),
        ("int trafficClass", "size_t trafficClass", "ncclConfig_t.trafficClass"),
        ("int color, int key", "int color, size_t key", "ncclCommSplit has another signature"),
        ("char bytes[128]", "char bytes[64]", "ncclUniqueId is laid out differently"),
    ],
)
def test_a_mistake_is_detected(tmp_path: Path, right: str, wrong: str, complaint: str) -> None:
    if not packages():
        pytest.skip(ABSENT)
    text = (ROOT / "csrc/nccl/abi.h").read_text()
    assert right in text
    (tmp_path / "nccl").mkdir()
    (tmp_path / "nccl/abi.h").write_text(text.replace(right, wrong))
    run = compile_against(packages()[0], tmp_path)
    assert run.returncode != 0
    assert complaint in run.stderr


@pytest.mark.parametrize("place", FOUND, ids=label)
def test_library(place: Path) -> None:
    folder = os.environ.get("CPP_TEST_DIR")
    if not folder:
        pytest.skip("CPP_TEST_DIR is not set; ./dev test builds the C++ tests and sets it")
    library = place / "nvidia/nccl/lib/libnccl.so.2"
    run = subprocess.run(
        [Path(folder) / "nccl_library_test", "NcclLibrary.opensARealOne"],
        env=os.environ | {"NCCL_TEST_LIBRARY": str(library)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"NCCL {version_of(place)} ({library})" in run.stdout
    assert "commSplit memAlloc memFree commRegister" in run.stdout
    assert "commWindowDeregister commRevoke" in run.stdout
