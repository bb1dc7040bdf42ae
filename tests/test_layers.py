"""The layers of csrc/ point one way, and only the top two know torch and Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent / "csrc"

# What each folder may include besides itself.
ALLOWED = {
    "base": set[str](),
    "kernels": {"base"},
    "transport": {"base", "kernels"},
    "collectives": {"base", "kernels", "transport"},
    "observe": {"base"},
    "engine": {"base", "kernels", "transport", "collectives", "observe"},
    "nccl": {"base"},
    "backend": {"base", "kernels", "transport", "collectives", "observe", "engine", "nccl"},
    "bindings": {
        "base",
        "kernels",
        "transport",
        "collectives",
        "observe",
        "engine",
        "nccl",
        "backend",
    },
}
KNOW_TORCH = {"backend", "bindings"}
TORCH = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h|torch\.h")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
SOURCES = sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cpp", ".inc"})


def test_every_folder_is_a_layer() -> None:
    folders = {path.name for path in CSRC.iterdir() if path.is_dir()}
    assert folders <= set(ALLOWED), "a new folder of csrc needs its place among the layers"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(CSRC)))
def test_includes(source: Path) -> None:
    layer = source.relative_to(CSRC).parts[0]
    for bracket, name in INCLUDE.findall(source.read_text()):
        if TORCH.match(name):
            assert layer in KNOW_TORCH, f"{layer} must build without torch or Python: {name}"
        elif bracket == '"':
            beside = source.parent / name
            included = beside if "/" not in name else CSRC / name
            assert included.is_file(), f'"{name}" is named from csrc/ (or lies in the same folder)'
            target = included.relative_to(CSRC).parts[0]
            assert target == layer or target in ALLOWED[layer], f"{layer} is below {target}: {name}"


def test_engine_tests_know_no_torch() -> None:
    for source in sorted((CSRC.parent / "tests/cpp").glob("*.*")):
        for _, name in INCLUDE.findall(source.read_text()):
            assert not TORCH.match(name), f"{source.name}: {name}"
            assert name.split("/")[0] not in KNOW_TORCH, f"{source.name}: {name}"
