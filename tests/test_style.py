"""Rules of CONTRIBUTING.md that a search for patterns can check."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC, PACKAGE, BENCHMARKS = ROOT / "csrc", ROOT / "python/mycoll", ROOT / "benchmarks"
NO_TORCH = "base kernels transport collectives observe engine nccl"
BELOW_TORCH = [CSRC / name for name in NO_TORCH.split()]

MESSAGE = r"(message|text|what|how|reason|problem)[a-zA-Z_.()]*"
MESSAGES_IN_CPP = rf"{MESSAGE}\.(find|starts_with|contains)\(|== *kHas|what\(\)\)?\.find"
MESSAGES_IN_PYTHON = (
    r"""["'] (not )?in (str\(error\)|error\.args|message\b)|(search|match)\(.*str\(error\)"""
)
# These files parse text that is not a message; status.cpp adds a group's name to a text without
# one.
PARSERS = {
    "base/env.cpp",
    "base/status.cpp",
    "engine/roster.cpp",
    "observe/black_box.cpp",
    "transport/peer.cpp",
}

# Sleeps over one second, because a test should wait for an event, not for a time. Sleeps of more
# than a minute are allowed: these processes are killed.
LONG_SLEEPS = (
    r"\bsleep\((1\.\d*[1-9]|([2-9]|[1-5]\d)(\.\d+)?)\)"
    r"|sleep_for\((1[1-9]\d\dms|[2-9]'?\d{3}ms|\d+s\b|std::chrono::seconds"
    r"|std::chrono::milliseconds\((1'?[1-9]\d\d|1'?0[1-9]\d|[2-9]'?\d{3}|\d{2,}'?\d{3})\))"
)

# Files whose locks have a deadline or are handed over, which Mutex does not support, or belong to
# torch; and the implementation of Mutex.
OTHER_LOCKS = {
    "backend/callback_order.cpp",
    "base/mutex.h",
    "base/portable.cpp",
    "nccl/comm.cpp",
    "nccl/comm.h",
    "nccl/issue.cpp",
    "nccl/issue.h",
    "transport/io_lock.h",
}

# These need symbols of glibc or libstdc++ that manylinux_2_28 lacks.
NEWER_THAN_THE_WHEEL = (
    r"#include <(barrier|filesystem|format|future|latch|semaphore|stop_token|syncstream)>|call_once"
)

CPP, PYTHON = ("*.h", "*.cpp", "*.inc"), ("*.py",)


def found(pattern: str, folders: list[Path], names: tuple[str, ...]) -> dict[str, str]:
    """The lines that match a pattern, by file and line number."""
    lines = {}
    for folder in folders:
        for path in sorted(path for name in names for path in folder.rglob(name)):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if re.search(pattern, line):
                    lines[f"{path.relative_to(ROOT)}:{number}"] = line.strip()
    return lines


@pytest.mark.quick
def test_no_decision_reads_the_text_of_a_message() -> None:
    """A Status has a code and a Cause with fields; an exception has a type."""
    places = found(MESSAGES_IN_CPP, [CSRC], CPP)
    places |= found(MESSAGES_IN_PYTHON, [PACKAGE, BENCHMARKS], PYTHON)
    excused = tuple(f"/{name}:" for name in PARSERS)
    assert all((CSRC / name).exists() for name in PARSERS)
    assert not {
        place: line for place, line in places.items() if not any(name in place for name in excused)
    }


@pytest.mark.quick
@pytest.mark.parametrize(
    ("pattern", "folders", "names"),
    [
        (r"\b(TODO|FIXME|XXX|HACK)\b", [CSRC, PACKAGE, BENCHMARKS], CPP + PYTHON),
        (r"^\s*throw (?!std::bad_alloc|;)", BELOW_TORCH, CPP),  # errors are a Status there
        (r"\bmutex\b", [CSRC / "kernels"], CPP),  # ./dev lint does not check locks there
        (NEWER_THAN_THE_WHEEL, [CSRC], CPP),
        (LONG_SLEEPS, [ROOT / "tests" / name for name in ("cpp", "jobs")], CPP + PYTHON),
        (LONG_SLEEPS, [ROOT / "tests"], ("test_*.py",)),
    ],
    ids=[
        "no open tasks",
        "no exceptions below device",
        "no locks in kernels",
        "nothing that the systems of the wheel lack",
        "no long sleep in jobs and tests of C++",
        "no long sleep in tests",
    ],
)
def test_forbidden_patterns(pattern, folders, names) -> None:
    assert not found(pattern, folders, names)


@pytest.mark.quick
def test_locks_can_be_checked_by_clang() -> None:
    """Code uses Mutex and MutexLock (base/mutex.h), with fields that are GUARDED_BY them."""
    places = found(r"\bstd::(mutex|lock_guard|scoped_lock|shared_mutex)\b", [CSRC], CPP)
    excused = tuple(f"/{name}:" for name in OTHER_LOCKS)
    assert not {
        place: line for place, line in places.items() if not any(name in place for name in excused)
    }


@pytest.mark.quick
def test_children_of_a_fork_have_locks_of_their_own() -> None:
    """A static with a lock is made by perProcess() (base/os.h): another thread may hold the lock
    while this one forks. SharedHeap's is held during a fork."""
    lock = r"(std::mutex|Mutex) (\w+;|\{)"
    for path in CSRC.rglob("*.cpp"):
        source = path.read_text()
        assert not re.search(rf"static {lock}|static \w+\* const \w+ = new Mutex\b", source), path
        for name in re.findall(r"static (\w+)\* const \w+ = new \1;", source):
            body = re.search(rf"^( *)(class|struct) {name}\b.*?^\1\}};", source, re.M | re.S)
            assert not body or not re.search(lock, body[0]), f"{path}: {name}"


def test_files() -> None:
    for header in CSRC.rglob("*.h"):
        text = header.read_text()
        assert text.startswith("//"), f"{header}: must start with a comment"
        # foreach_isa.h is made to be included several times.
        assert "#pragma once" in text or header.name == "foreach_isa.h", header
    for folder in (CSRC, PACKAGE, BENCHMARKS):
        assert not list(folder.rglob("*util*")), "files are nouns"


def test_top_level_files() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("git cannot read the checkout")
    top = {path.split("/")[0] for path in listed.stdout.splitlines()}
    folders = {".ci", "benchmarks", "csrc", "docs", "examples", "python", "tests"}
    code = {"CMakeLists.txt", "CMakePresets.json", "MANIFEST.in", "dev", "mkdocs.yml"}
    code |= {"pyproject.toml", "setup.py", "requirements-clients.txt", "requirements-dev.txt"}
    text = {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md"}
    left = {name for name in top - folders - code - text if not name.startswith(".")}
    assert not left, "unexpected files at the top level"
