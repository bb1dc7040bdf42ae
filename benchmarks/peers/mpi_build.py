"""Finds the MPIs of this machine, and builds mpi_bench.c with the compiler of each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("mpi_bench.c")
_BUILD_SECONDS = 120
_ASK_SECONDS = 20


class PeerAbsent(Exception):
    """An MPI that cannot be measured here; the message names what is missing, and how to get it."""


@dataclass(frozen=True)
class _Family:
    """How to distinguish an MPI from another one whose programs have the same names."""

    suffix: str
    mark: str
    package: str


_FAMILIES = {
    "openmpi": _Family("openmpi", "Open", "openmpi-bin libopenmpi-dev"),
    "mpich": _Family("mpich", "HYDRA", "mpich libmpich-dev"),
}
_INTEL_LIBRARY = Path("lib") / "libmpi.so.12"
_INTEL_LAUNCHER = Path("bin") / "mpiexec.hydra"
# Sockets only, to compare with mycoll without shared memory.
_TCP_ARGUMENTS: dict[str, list[str]] = {
    "openmpi": ["--mca", "pml", "ob1", "--mca", "btl", "self,tcp"],
    "mpich": [],
}
# MPICH is built on libfabric or on UCX; each has its own variable, and ignores that of the other.
_TCP_VARIABLES: dict[str, dict[str, str]] = {
    "openmpi": {},
    "mpich": {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "FI_PROVIDER": "tcp"},
}


def _split(name: str) -> tuple[str, bool]:
    family, _, variant = name.partition("-")
    return family, variant == "tcp"


def _tool(tool: str, family: _Family) -> str:
    """`mpicc.openmpi` if the distribution has several MPIs, otherwise `mpicc` if it is of this
    MPI."""
    specific = shutil.which(f"{tool}.{family.suffix}")
    if specific:
        return specific
    plain, launcher = shutil.which(tool), shutil.which("mpiexec")
    if plain and launcher:
        answer = subprocess.run(
            [launcher, "--version"], capture_output=True, text=True, timeout=_ASK_SECONDS
        )
        if family.mark in answer.stdout:
            return plain
    raise PeerAbsent(f"no {tool} of its own here (Debian, Ubuntu: apt install {family.package})")


def _intel_root() -> Path:
    """The folder of Intel MPI: I_MPI_ROOT, or that of a wheel in this environment."""
    for place in (os.environ.get("I_MPI_ROOT", ""), sys.prefix):
        root = Path(place)
        if place and (root / _INTEL_LIBRARY).is_file() and (root / _INTEL_LAUNCHER).is_file():
            return root
    raise PeerAbsent("not installed (pip install impi-rt, or set I_MPI_ROOT)")


def _compiler(family: str) -> tuple[list[str], list[str]]:
    """The words before and after the source file on the compiler's command line.

    Intel's wheel has no headers. Its library keeps MPICH's binary interface, so MPICH's fit.
    """
    if family != "intelmpi":
        return [_tool("mpicc", _FAMILIES[family])], []
    root = _intel_root()
    wrapper = [_tool("mpicc", _FAMILIES["mpich"]), "-show"]
    answer = subprocess.run(wrapper, capture_output=True, text=True, timeout=_ASK_SECONDS)
    words = answer.stdout.split()
    if not words:
        raise PeerAbsent(f"{wrapper[0]} -show printed nothing")
    return [words[0], *(word for word in words if word.startswith("-I"))], [
        str(root / _INTEL_LIBRARY)
    ]


def build(name: str, folder: Path) -> Path:
    """Builds the program for this peer in the folder, and returns its path."""
    family, _ = _split(name)
    before, after = _compiler(family)
    binary = folder / f"mpi_bench.{name}"
    command = [*before, "-std=gnu11", "-O2", str(_SOURCE), *after, "-o", str(binary)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise PeerAbsent(f"{before[0]} failed: {errors[0]}")
    return binary


def launch_command(name: str, ranks: int) -> list[str]:
    """The defaults of this MPI, except that more ranks than cores are allowed."""
    family, tcp = _split(name)
    if family == "intelmpi":
        return [str(_intel_root() / _INTEL_LAUNCHER), "-n", str(ranks)]
    command = [_tool("mpiexec", _FAMILIES[family]), "-n", str(ranks)]
    if family == "openmpi":
        command += ["--oversubscribe"]
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return command + (_TCP_ARGUMENTS[family] if tcp else [])


def environment(name: str) -> dict[str, str]:
    """The environment without the harness' rank variables, which some launchers read as their
    own."""
    family, tcp = _split(name)
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {key: value for key, value in os.environ.items() if key not in ours}
    if family == "intelmpi":
        root = _intel_root()
        paths = [str(root / "lib"), *filter(None, [inherited.get("LD_LIBRARY_PATH")])]
        intel = {"I_MPI_ROOT": str(root), "LD_LIBRARY_PATH": ":".join(paths)}
        return {**inherited, **intel, "I_MPI_FABRICS": "shm"}
    return {**inherited, **(_TCP_VARIABLES[family] if tcp else {})}
