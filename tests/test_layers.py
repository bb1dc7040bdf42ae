"""Includes and imports of csrc/ and of the package point to lower layers only; only the upper
layers of csrc/ use torch."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent / "csrc"

# The folders that each folder may include besides itself and its own sub-folders. A name means the
# folder and its sub-folders.
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
USE_TORCH = {"backend", "device", "bindings"}
TORCH = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h|torch\.h")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def sources(csrc: Path) -> list[Path]:
    return sorted(p for p in csrc.rglob("*") if p.suffix in {".h", ".cpp", ".inc"})


def is_in(folder: str, parent: str) -> bool:
    return folder == parent or folder.startswith(parent + "/")


def problems(csrc: Path) -> list[str]:
    """Errors in the includes of a tree, one line each."""
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
                if folder not in USE_TORCH:
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
            # The parent folder is allowed without its other sub-folders.
            allowed = (
                target == each if is_in(folder, each) else is_in(target, each)
                for each in ALLOWED[folder]
            )
            if not any(allowed):
                found.append(f"{where}: {folder} is below {target}, or beside it: {name}")
    return found + circles(csrc, graph)


def circles(csrc: Path, graph: dict[Path, list[Path]]) -> list[str]:
    """Sub-folders and headers that include themselves indirectly, through the parent folder."""
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
        ("base/wait.h", "no_such_file.h"),
    ],
)
def test_an_include_from_above_is_found(tmp_path: Path, file: str, name: str) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    planted = csrc / file
    planted.write_text(f'#include "{name}"\n' + planted.read_text())
    assert any(Path(file).name in each for each in problems(csrc))


def test_a_new_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "base" / "drawer").mkdir(parents=True)
    (tmp_path / "base" / "drawer" / "misc.h").write_text("#pragma once\n")
    assert problems(tmp_path) == [
        "base/drawer/misc.h: the folder base/drawer needs its place among the layers"
    ]


def test_engine_tests_do_not_use_torch() -> None:
    for source in sorted((CSRC.parent / "tests/cpp").glob("*.*")):
        for _, name in INCLUDE.findall(source.read_text()):
            assert not TORCH.match(name), f"{source.name}: {name}"
            assert name.split("/")[0] not in USE_TORCH, f"{source.name}: {name}"


# --- the package ----------------------------------------------------------------------------------

PACKAGE = CSRC.parent / "python/mycoll"
# From the bottom to the top: a module imports only modules before it, at its top and inside of
# functions. Imports for types do not count.
LINES = """
_version _load _C _native
_units _terminal _leaving
_log _groups
_gloo parcel _compat
objects shared memory
_create
groups replace rendezvous launch
elastic
black_box
timeline metrics trace status explain doctor
bench.options bench.result bench.plot bench.report bench.compare
bench.world bench.arena bench.patterns bench.workload
bench.collectives bench.pairwise bench.contenders bench.rounds
bench.run bench
demo_training demo
adapters adapters.torchft
_registration __init__ __main__
"""
ORDER = LINES.split()


def modules(package: Path) -> dict[str, Path]:
    """The modules by their names in the package; the package itself is __init__."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(path: Path, known: set[str]) -> list[str]:
    """The modules of the package that a file imports when it runs."""
    found = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for each in node.names:
                whole = f"{node.module}.{each.name}"
                found.append(whole if whole.removeprefix("mycoll.") in known else f"{node.module}")
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    inside = [each for each in found if each.split(".")[0] == "mycoll"]
    return ["__init__" if each == "mycoll" else each.removeprefix("mycoll.") for each in inside]


def imports_from_above(package: Path) -> list[str]:
    found = modules(package)
    problems = [f"{name} needs its place in ORDER" for name in found if name not in ORDER]
    for name, path in found.items():
        for other in imports(path, set(found)):
            if name in ORDER and other in ORDER and ORDER.index(other) >= ORDER.index(name):
                problems.append(f"{name} imports {other}, which is above it")
    return problems


def test_modules_import_what_is_below_them() -> None:
    assert not imports_from_above(PACKAGE)
    assert set(ORDER) == set(modules(PACKAGE)), "ORDER has names that do not exist"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("_native", "from mycoll import _log"),
        ("_log", "def later():\n    from mycoll._create import prepare"),
        ("bench.result", "import mycoll.bench.rounds"),
        ("shared", "from mycoll import zeros"),
    ],
)
def test_an_import_from_above_is_found(tmp_path: Path, name: str, line: str) -> None:
    package = tmp_path / "mycoll"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("torch*", "*.so"))
    path = modules(package)[name]
    path.write_text(f"{path.read_text()}\n{line}\n")
    assert any(each.startswith(f"{name} imports ") for each in imports_from_above(package))


def test_a_new_module_is_found(tmp_path: Path) -> None:
    (tmp_path / "misc.py").write_text("")
    assert imports_from_above(tmp_path) == ["misc needs its place in ORDER"]


TESTS = Path(__file__).resolve().parent


def test_no_file_of_tests_imports_another() -> None:
    """Code that several of them use is in jobs/, worlds/ or faults/."""
    names = {path.stem for path in TESTS.rglob("test_*.py")}
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            found = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                found = [f"{node.module}"]
            assert not names & {part for each in found for part in each.split(".")}, path
