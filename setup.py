"""Runs CMake and ninja for mycoll._C. Everything else about the package is in pyproject.toml.

Since compiling takes minutes, missing tools are reported first, with the command that installs
them.

`./dev wheel` sets TORCH_DIRS, torch's headers of several minors: the wheel then supports each of
these, and this environment needs no torch. For another machine it also sets CMAKE_ARGS, which is
passed to CMake, and _PYTHON_HOST_PLATFORM, which names the machine to Python.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent
AGAIN = "pip install --no-build-isolation ."
SECONDS_A_FILE = 10  # roughly, on one core
TORCH_DIRS = [folder for folder in os.environ.get("TORCH_DIRS", "").split(os.pathsep) if folder]


def stop(problem: str, remedy: str) -> NoReturn:
    sys.exit(f"{problem}\nDo: {remedy}")


if sys.platform != "linux":
    sys.exit(f"mycoll works on Linux, and this is {sys.platform}.")

if sys.version_info < (3, 10):  # noqa: UP036  # pip may be too old to look at pyproject.toml
    stop(
        f"mycoll needs Python 3.10 or newer, and this is {sys.version.split()[0]}.",
        f"python3.12 -m venv venv && . venv/bin/activate && pip install torch && {AGAIN}",
    )

try:
    TORCH = "" if TORCH_DIRS else version("torch")
except PackageNotFoundError:
    stop(
        "mycoll is compiled against your torch, and this build has none (pip isolates builds).",
        f"pip install torch cmake ninja wheel 'setuptools>=77' && {AGAIN}",
    )

if int(version("setuptools").split(".")[0]) < 77:
    stop(
        f"mycoll's build needs setuptools 77 or newer, and this is {version('setuptools')}.",
        f"pip install 'setuptools>=77' && {AGAIN}",
    )

# After the versions: an old setuptools may not import here.
from setuptools import Extension, setup  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402


def supported_torch() -> tuple[tuple[int, int], tuple[int, int]]:
    names: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
    exec((ROOT / "python/mycoll/_version.py").read_text(), names)
    return names["SUPPORTED_TORCH"]


def required_torch() -> str:
    """The requirement in the metadata. Virtual functions of c10d::Backend differ between minors of
    torch, so there is a module for each."""
    first, last = supported_torch()
    span = f"torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
    if TORCH_DIRS:
        return span
    major, minor = (int(part) for part in TORCH.split(".")[:2])
    if not first <= (major, minor) <= last:
        stop(
            f"mycoll works with torch {first[0]}.{first[1]} to {last[0]}.{last[1]}, "
            f"and this is torch {TORCH}.",
            f"pip install '{span}' && {AGAIN}",
        )
    return f"torch=={major}.{minor}.*"


def check_compiler() -> None:
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler.split()[0]):
        stop(
            f"mycoll's build needs a C++ compiler, and there is no {compiler}.",
            f"sudo apt-get install g++ && {AGAIN}   (Fedora: dnf install gcc-c++)",
        )
    command = [*compiler.split(), "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(command, input=b"#include <barrier>\n", capture_output=True)
    if done.returncode:
        stop(
            f"mycoll's build needs a compiler that supports C++20, and {compiler} does not.",
            f"sudo apt-get install g++-12 && CXX=g++-12 {AGAIN}",
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        stop(
            f"The headers of {sys.executable} are missing (Python.h).",
            f"sudo apt-get install python3-dev && {AGAIN}",
        )


def tool(name: str) -> str:
    """The tool beside this interpreter (pip does not put that on PATH), or the one on PATH."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    return found or stop(f"mycoll's build needs {name}.", f"pip install {name} && {AGAIN}")


def run(command: list[str]) -> None:
    if subprocess.run(command).returncode:
        sys.exit(f"mycoll: {Path(command[0]).name} failed; see its message above.")


def announce(ninja: str, tree: Path) -> None:
    """Prints how long this will take. pip hides the output of a build, so the line is also written
    to the terminal."""
    command = [ninja, "-C", str(tree), "-t", "commands", "_C"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout
    objects = re.findall(r" -o (\S+\.o) -c ", lines)
    files = sum(not (tree / name).exists() for name in objects)
    if not files:
        return
    cores = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    minutes = max(1, round(files * SECONDS_A_FILE / cores / 60))
    which = f"torch {TORCH}" if TORCH else f"{len(TORCH_DIRS)} versions of torch"
    line = f"mycoll: compiling {files} files for {which}: about {minutes} min on {cores} cores"
    hint = "mycoll: `pip install -v` shows each file"
    print(line, hint, sep="\n", file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        try:
            with Path("/dev/tty").open("w") as terminal:
                terminal.write(f"\r\n{line}\r\n{hint}\r\n")
        except OSError:
            pass  # there is none


class CMakeBuild(build_ext):  # type: ignore[misc]  # setuptools is untyped
    """Builds each Python and torch in its own tree, so that the second build is short. Wheels for
    several Pythons share one tree, because only csrc/bindings depends on Python."""

    def run(self) -> None:
        cmake, ninja = tool("cmake"), tool("ninja")
        check_compiler()
        choices = [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DMYCOLL_PYTHON={sys.executable}"]
        choices += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        if TORCH_DIRS:
            machine = sysconfig.get_platform().removeprefix("linux-")
            tree = ROOT / f"build/wheel-{machine}"
            is_portable = machine in ("x86_64", "aarch64")  # portable.cpp has their versions
            choices += [f"-DMYCOLL_TORCH_DIRS={';'.join(TORCH_DIRS)}"]
            choices += [f"-DMYCOLL_PORTABLE={int(is_portable)}"]
        else:
            tree = ROOT / "build" / f"{sys.implementation.cache_tag}-torch{TORCH}"
        # Editable installs are for development, so build the tests, too.
        if self.editable_mode:
            choices += ["-DMYCOLL_TESTS=ON"]
        (tree / "configured").unlink(missing_ok=True)  # ./dev configures its own choices again
        run([cmake, "-S", str(ROOT), "-B", str(tree), "-G", "Ninja", *choices])
        build = [ninja, "-C", str(tree), "all" if self.editable_mode else "_C"]
        build += ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        announce(ninja, tree)
        run(build)
        target = Path(self.get_ext_fullpath("mycoll._C")).parent  # in place when editable
        # Remove files of an earlier build, which would be installed, too.
        for left in target.glob("torch[0-9]*"):
            shutil.rmtree(left)
        for left in target.glob("_C.*.so"):
            left.unlink()
        python = sysconfig.get_config_var("EXT_SUFFIX").split("-")[:2]  # [".cpython", "311"]
        for module in (tree / "module").glob(f"torch*/_C{'-'.join(python)}-*.so"):
            (target / module.parent.name).mkdir(parents=True)
            shutil.copy2(module, target / module.parent.name)
        shutil.copy2(tree / "module/libmycoll.so", target)
        if not self.editable_mode:
            shutil.copy2(ROOT / "docs/errors.md", target)  # for `mycoll explain`


setup(
    ext_modules=[Extension("mycoll._C", sources=[])],  # empty: only sets the tag of the wheel
    cmdclass={"build_ext": CMakeBuild},
    # torch does not require numpy, but its object collectives (all_gather_object, ...) need it.
    install_requires=[required_torch(), "numpy"],
)
