"""./dev: its options, and its errors, which name the command that installs what is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("dev", "requirements-dev.txt", "CMakePresets.json"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    return tmp_path


def dev(checkout: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "dev", *words],
        cwd="/",
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def stand_in(checkout: Path, name: str, script: str) -> str:
    """A PATH on which `name` is the given shell script."""
    folder = checkout / "bin"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_verbs(checkout: Path) -> None:
    listed = dev(checkout)
    assert listed.returncode == 0
    for verb in ("demo", "test", "gpu", "lint", "sanitize", "bench", "build", "wheel"):
        assert f"\n  {verb} " in listed.stdout
    unknown = dev(checkout, "tset")
    assert unknown.returncode == 1 and "there is no verb 'tset'" in unknown.stderr


def test_no_compiler(checkout: Path) -> None:
    done = dev(checkout, "build", "--python", sys.executable, CXX="no-such-compiler")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "mycoll: a C++ compiler is missing: sudo apt-get install g++"
    )


def test_old_compiler(checkout: Path) -> None:
    path = stand_in(checkout, "old-c++", "exit 1")
    done = dev(checkout, "build", "--python", sys.executable, PATH=path, CXX="old-c++")
    assert done.returncode == 1
    assert "old-c++ does not know C++20" in done.stderr.splitlines()[-1]


def test_no_venv_module(checkout: Path) -> None:
    real = shutil.which("python3") or sys.executable
    path = stand_in(checkout, "python3", f'case "$*" in *venv*) exit 1 ;; esac\nexec {real} "$@"')
    done = dev(checkout, "test", PATH=path)
    assert done.returncode == 1
    assert done.stderr == (
        "mycoll: Python's venv module is missing: sudo apt-get install python3-venv\n"
    )


def test_python_without_torch(checkout: Path) -> None:
    path = stand_in(checkout, "bare-python", f'exec {sys.executable} -S -I "$@"')
    done = dev(checkout, "test", "--python", "bare-python", PATH=path)
    assert done.returncode == 1
    assert "needs torch and pytest; --python installs nothing" in done.stderr
    assert not (checkout / "build").exists() and not (checkout / ".venv").exists()


def test_contradiction(checkout: Path) -> None:
    done = dev(checkout, "test", "--torch", "2.13.0", "--python", sys.executable)
    assert done.returncode == 1 and "exclude each other" in done.stderr


def shown(checkout: Path, *words: str) -> list[str]:
    """The arguments of the program that a verb starts, without the build before it. The interpreter
    is replaced by one that prints its arguments."""
    script = checkout / "dev"
    text = script.read_text().replace(
        "\nbuild() {", "\nbuild() { prepare_python; }\nreal_build() {"
    )
    script.write_text(text)
    show = f'case "$1" in -c) exec {sys.executable} "$@" ;; esac\nprintf "%s\\n" "$@"'
    stand_in(checkout, "showing", show)
    done = dev(checkout, *[word.replace("HERE", str(checkout / "bin/showing")) for word in words])
    assert done.returncode == 0, done.stderr
    assert not (checkout / ".venv").exists()
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "words",
    [
        ["gpu", "smoke", "--rehearse", "--python", "HERE"],
        ["gpu", "--python", "HERE", "smoke", "--rehearse"],
        ["gpu", "smoke", "--python=HERE", "--rehearse"],
    ],
)
def test_options_of_dev_may_be_anywhere(checkout: Path, words: list[str]) -> None:
    assert shown(checkout, *words) == ["-m", "gpu", "smoke", "--rehearse"]


def test_quoted_arguments_are_not_split(checkout: Path) -> None:
    words = ["test", "-k", "one or two", "--python", "HERE", "--deadline", "20"]
    assert shown(checkout, *words) == ["-m", "pytest", "-k", "one or two", "--deadline", "20"]


def test_selections_of_tests(checkout: Path) -> None:
    """`test` and `test --tools` together run all tests."""
    for words, chosen in ([], "not tools"), (["--tools"], "tools"):
        assert shown(checkout, "test", *words, "--python", "HERE")[:4] == [
            "-m",
            "pytest",
            "-m",
            chosen,
        ]
    some = shown(checkout, "test", "--tools", "-x", "--python", "HERE")
    assert some == ["-m", "pytest", "-m", "tools", "-x"]


def test_options_that_are_not_of_dev(checkout: Path) -> None:
    """Options after `--`, and options of a program, are passed on."""
    other = ["--python", "no-such-interpreter", "--torch", "9.9.9"]
    passed_on = shown(checkout, "bench", "--nproc", "2", "--python", "HERE", "--", *other)
    assert passed_on == ["-m", "mycoll", "bench", "--nproc", "2", "--", *other]
    assert shown(checkout, "python", "--python", "HERE", "x.py", *other) == ["x.py", *other]
    assert shown(checkout, "python", "--python", "HERE", "-m", "x", *other) == ["-m", "x", *other]


@pytest.mark.parametrize("option", ["--python", "--torch"])
def test_option_without_a_value(checkout: Path, option: str) -> None:
    done = dev(checkout, "test", "-x", option)
    assert done.returncode == 1
    assert f"mycoll: {option} needs a value" in done.stderr


def sanitized(checkout: Path, *words: str, **programs: str) -> subprocess.CompletedProcess[str]:
    """Runs `./dev sanitize` with these scripts as the programs of tests/cpp. Each has one test,
    Suite.NAME. An empty script means that the program was not built."""
    script = checkout / "dev"
    text = script.read_text().replace("\ncmake_build() {", "\ncmake_build() { :; }\nreal_build() {")
    script.write_text(text)
    suffix = "-short" if "--short" in words else ""
    for kind in ("tsan", "asan"):
        tree = checkout / f"build/{kind}{suffix}"
        tree.mkdir(parents=True)
        for name, body in programs.items():
            if body:
                list_it = f'if [ "$1" = --list ]; then echo Suite.{name}; exit; fi'
                (tree / name).write_text(f"#!/bin/sh\n{list_it}\n{body}\n")
                (tree / name).chmod(0o755)
        (tree / "CTestTestfile.cmake").write_text(f"""
            set(folder "{tree}")
            set(programs "{";".join(programs)}")
            set(is_short "{"ON" if suffix else "OFF"}")
            include("{ROOT}/tests/cpp/discover.cmake")
            """)
    return dev(checkout, "sanitize", *words, "--python", sys.executable)


def test_sanitize_runs_all_programs(checkout: Path) -> None:
    done = sanitized(checkout, a_test="exit 0", b_test="exit 0", c_test="exit 77")
    assert done.returncode == 0, done.stdout
    for name in ("a_test", "b_test"):
        assert len(re.findall(rf"{name}\.Suite\.{name} .*Passed", done.stdout)) == 2
    assert len(re.findall(r"c_test\.Suite\.c_test .*\*\*\*Skipped", done.stdout)) == 2


def test_sanitize_runs_selected_tests(checkout: Path) -> None:
    words = ["a_test", "Suite.b"]
    done = sanitized(checkout, *words, a_test="exit 0", b_test="exit 0", c_test="exit 1")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("100% tests passed out of 2") == 2


@pytest.mark.parametrize(
    ("words", "programs", "message"),
    [
        ([], {"a_test": "exit 0", "b_test": ""}, "b_test.NOT_BUILT"),
        ([], {"a_test": "exit 1"}, "a_test.Suite.a_test (Failed)"),
        ([], {}, "No tests were found"),
        (["Suite", "NoSuch"], {"a_test": "exit 0"}, "no C++ test has 'NoSuch' in its name"),
        (["--short"], {"a_test": "exit 0"}, "No tests were found"),
        (["--short"], {"transport_test": ""}, "transport_test.NOT_BUILT"),
        (
            ["--short"],
            {"transport_test": "exit 77"},
            "transport_test.Suite.transport_test (Failed)",
        ),
    ],
    ids=[
        *("not built", "fails", "no tests", "no such test"),
        *("short, no tests", "short, not built", "short, skipped"),
    ],
)
def test_sanitize_fails_if_a_test_does_not_run(
    checkout: Path, words: list[str], programs: dict[str, str], message: str
) -> None:
    done = sanitized(checkout, *words, **programs)
    output = done.stdout + done.stderr
    assert done.returncode == 1 and message in output, output


@pytest.mark.parametrize("name", ["tsan-short", "asan-short"])
def test_each_word_of_a_short_selection_matches_a_test(name: str) -> None:
    """Detects a renamed test before the stage is built."""
    presets = json.loads((ROOT / "CMakePresets.json").read_text())
    [built] = [each["targets"] for each in presets["buildPresets"] if each["name"] == name]
    [run] = [each["filter"] for each in presets["testPresets"] if each["name"] == name]
    tests = [
        f"{source.stem}.{suite}.{test}"
        for source in (ROOT / "tests/cpp").glob("*_test.cpp")
        for suite, test in re.findall(r"^TEST\((\w+), (\w+)\)", source.read_text(), re.M)
    ]
    include = run["include"]["name"]
    assert {test.partition(".")[0] for test in tests if re.search(include, test)} == set(built)
    for alternative in re.split(r"\|(?=\^)", include):
        before, words, after = re.fullmatch(
            r"(\^.*?)\(?([\w|]+)\)?((?:_test\\\.)?)", alternative
        ).groups()
        for word in words.split("|"):
            assert any(re.search(before + word + after, test) for test in tests), word
    if "exclude" in run:
        assert any(re.search(run["exclude"]["name"], test) for test in tests)


def test_gpu_without_one(checkout: Path) -> None:
    """It fails before anything is built."""
    done = dev(checkout, "gpu", "--python", sys.executable, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "./dev gpu needs a GPU" in done.stderr
    assert not (checkout / "build").exists()
