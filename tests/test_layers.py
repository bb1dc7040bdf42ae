"""The layers of csrc/ point one way, sub-folders included, and only the top ones know torch."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent / "csrc"

# What each folder may include besides itself and its own sub-folders. A name stands for the folder
# and the sub-folders in it.
ENGINE = {"base", "kernels", "transport", "collectives", "observe"}
ALLOWED = {
    "base": set[str](),
    "kernels": {"base"},
    "transport": {"base", "kernels"},
    "transport/shm": {"base", "kernels", "transport"},
    "transport/tcp": {"base", "kernels", "transport"},
    "collectives": {"base", "kernels", "transport"},
    "collectives/plan": {"base", "collectives/plan"},
    "collectives/shm": {"base", "kernels", "transport", "collectives"},
    # Plans use the arena of a host.
    "collectives/run": {
        "base",
        "kernels",
        "transport",
        "collectives",
        "collectives/plan",
        "collectives/shm",
    },
    "observe": {"base"},
    "engine": ENGINE,
    "nccl": {"base"},
    "backend": {*ENGINE, "engine"},
    "device": {*ENGINE, "engine", "nccl", "backend"},
    "bindings": {*ENGINE, "engine", "nccl", "backend", "device"},
}
KNOW_TORCH = {"backend", "device", "bindings"}
TORCH = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h|torch\.h")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def sources(csrc: Path) -> list[Path]:
    return sorted(p for p in csrc.rglob("*") if p.suffix in {".h", ".cpp", ".inc"})


def is_in(folder: str, parent: str) -> bool:
    return folder == parent or folder.startswith(parent + "/")


def problems(csrc: Path) -> list[str]:
    """What is wrong with the includes of a tree, one line each."""
    found = []
    graph: dict[Path, list[Path]] = {}
    for source in sources(csrc):
        graph[source] = []
        folder = source.relative_to(csrc).parent.as_posix()
        where = source.relative_to(csrc).as_posix()
        if folder not in ALLOWED:
            found.append(f"{where}: the folder {folder} needs its place among the layers")
            continue
        for bracket, name in INCLUDE.findall(source.read_text()):
            if TORCH.match(name):
                if folder not in KNOW_TORCH:
                    found.append(f"{where}: {folder} must build without torch or Python: {name}")
                continue
            if bracket != '"':
                continue
            included = source.parent / name if "/" not in name else csrc / name
            if not included.is_file():
                found.append(f'{where}: "{name}" is neither named from csrc/ nor beside it')
                continue
            graph[source].append(included)
            target = included.relative_to(csrc).parent.as_posix()
            if is_in(target, folder):
                continue
            # The folder above is allowed without its sub-folders, of which this one is one.
            allowed = (
                target == each if is_in(folder, each) else is_in(target, each)
                for each in ALLOWED[folder]
            )
            if not any(allowed):
                found.append(f"{where}: {folder} is below {target}, or beside it: {name}")
    return found + circles(csrc, graph)


def circles(csrc: Path, graph: dict[Path, list[Path]]) -> list[str]:
    """Sub-folders that come back to themselves through the folder above, and headers that do."""
    found = []
    for source, direct in graph.items():
        folder = source.parent
        for first in direct:
            if first != source and first.parent == folder:
                continue
            seen, left = {first}, [first]
            while left:
                for following in graph.get(left.pop(), []):
                    if following not in seen:
                        seen.add(following)
                        left.append(following)
            is_sub = "/" in folder.relative_to(csrc).as_posix()
            back = next((x for x in seen if x == source or (is_sub and x.parent == folder)), None)
            if back is not None:
                found.append(
                    f"{source.relative_to(csrc)}: {first.relative_to(csrc)} "
                    f"includes {back.relative_to(csrc)}"
                )
    return found


def test_includes() -> None:
    assert not problems(CSRC)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("base/wait.h", "engine/engine.h"),
        ("backend/request.cpp", "device/device_group.h"),
        ("transport/shm/link.cpp", "transport/tcp/link.h"),
        ("transport/link.h", "transport/shm/segment.h"),
        ("collectives/shm/arena.h", "collectives/run/run.h"),
        ("engine/op.h", "torch/torch.h"),
        ("base/wait.h", "wait_for_nobody.h"),
    ],
)
def test_an_arrow_up_is_seen(tmp_path: Path, file: str, name: str) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    planted = csrc / file
    planted.write_text(f'#include "{name}"\n' + planted.read_text())
    assert any(Path(file).name in each for each in problems(csrc))


def test_a_new_folder_is_seen(tmp_path: Path) -> None:
    (tmp_path / "base" / "drawer").mkdir(parents=True)
    (tmp_path / "base" / "drawer" / "misc.h").write_text("#pragma once\n")
    assert problems(tmp_path) == [
        "base/drawer/misc.h: the folder base/drawer needs its place among the layers"
    ]


def test_engine_tests_know_no_torch() -> None:
    for source in sorted((CSRC.parent / "tests/cpp").glob("*.*")):
        for _, name in INCLUDE.findall(source.read_text()):
            assert not TORCH.match(name), f"{source.name}: {name}"
            assert name.split("/")[0] not in KNOW_TORCH, f"{source.name}: {name}"
