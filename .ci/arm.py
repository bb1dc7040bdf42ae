"""./dev arm: tests mycoll for 64-bit Arm on an x86-64 machine, emulated by QEMU's user mode.

Runs the C++ tests. With --wheel, it tries a wheel for cp311 that `./dev wheel --machine aarch64`
made: with Debian's Python for Arm and torch's wheel for Arm, it runs .ci/smoke.py and then tests of
the suite. Words after the wheel are passed to pytest and replace that selection.

Needs root, as the kernel must learn to start programs for Arm (binfmt_misc), and Debian's packages
g++-aarch64-linux-gnu and qemu-user-static. About 300 MB are fetched for the first try of a wheel,
and kept in build/.

Of torch's wheel for Arm, which is built for CUDA, only the CPU part is used: empty functions stand
in for the CUDA libraries, which are large and would find no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
SYSROOT = BUILD / "aarch64-root"  # where .ci/qemu-aarch64 looks for libraries
SITE = BUILD / "aarch64-site"
RUN = Path(__file__).with_name("qemu-aarch64")
TORCH = "2.13.0"
BINFMT = Path("/proc/sys/fs/binfmt_misc")
# The head of an ELF file for this machine, and which of its bits count.
MAGIC = rb"\x7fELF\x02\x01\x01" + rb"\x00" * 9 + rb"\x02\x00\xb7\x00"
MASK = rb"\xff" * 7 + rb"\x00" + rb"\xff" * 8 + rb"\xfe\xff\xff\xff"
PACKAGES = """libc6 libgcc-s1 libstdc++6 libgomp1 libssl3 zlib1g libexpat1 libffi8 libbz2-1.0
    liblzma5 libuuid1 libcrypt1 python3.11 python3.11-minimal libpython3.11 libpython3.11-minimal
    libpython3.11-stdlib"""
MODULES = "numpy typing_extensions sympy networkx jinja2 fsspec filelock pytest pytest-timeout"
# A processor without what its description in /sys leaves open: torch reads both when it starts.
CPUINFO = """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimdrdm lrcpc asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1
"""
# Two ranks, as torch takes 10 seconds to start in a process. torch.compile would call the compiler
# of x86-64.
FILES = (
    "barrier ops p2p reductions mismatch objects windows shared_tensors coalesced work random_walk"
)
SELECTION = [f"tests/test_{name}.py" for name in FILES.split()]
SELECTION += ["-k", "2x and not inductor"]


def say(text: str) -> None:
    print(f"mycoll: {text}", file=sys.stderr, flush=True)


def run(*command: str | Path, **options: object) -> None:
    if subprocess.run([str(word) for word in command], cwd=ROOT, **options).returncode:  # type: ignore[call-overload]
        sys.exit(f"mycoll: {Path(command[0]).name} failed; its message stands above")


def lines(*command: str | Path) -> list[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


def prepare() -> None:
    for program, package in (
        ("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu"),
        ("qemu-aarch64-static", "qemu-user-static"),
    ):
        if not shutil.which(program):
            sys.exit(f"mycoll: {program} is missing: sudo apt-get install {package}")
    if os.geteuid() != 0:
        sys.exit("mycoll: ./dev arm needs root: the kernel must learn to start programs for Arm")
    if not (BINFMT / "register").exists():
        run("mount", "-t", "binfmt_misc", "none", BINFMT)
    if not (BINFMT / "qemu-aarch64").exists():
        emulator = os.fsencode(shutil.which("qemu-aarch64-static") or "")
        rule = b":".join([b"", b"qemu-aarch64", b"M", b"", MAGIC, MASK, emulator, b"F"])
        (BINFMT / "register").write_bytes(rule)


def make_sysroot() -> None:
    """Unpacks Debian's packages for Arm, without a change to this machine's own."""
    if (SYSROOT / "usr/bin/python3.11").exists():
        return
    say("fetching Debian's Python and libraries for Arm")
    shutil.rmtree(SYSROOT, ignore_errors=True)
    apt = SYSROOT / "apt"
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "conf").write_text(f"""
APT::Architecture "arm64";
APT::Architectures {{ "arm64"; }};
APT::Sandbox::User "root";
Dir::State "{apt}/state";
Dir::State::status "{apt}/status";
Dir::Cache "{apt}/cache";
""")
    environment = {**os.environ, "APT_CONFIG": str(apt / "conf")}
    run("apt-get", "-qq", "update", env=environment)
    command = ["apt-get", "-qq", "download", *PACKAGES.split()]
    subprocess.run(command, cwd=apt, env=environment, check=True)
    for package in apt.glob("*.deb"):
        run("dpkg", "-x", package, SYSROOT)
    shutil.rmtree(apt)
    (SYSROOT / "proc").mkdir()
    (SYSROOT / "proc/cpuinfo").write_text(CPUINFO)
    cpus = SYSROOT / "sys/devices/system/cpu"
    cpus.mkdir(parents=True)
    for name in ("possible", "present", "online"):
        (cpus / name).write_text("0\n")


def test_engine(words: list[str]) -> None:
    run("cmake", "--preset", "aarch64")
    run("cmake", "--build", "--preset", "aarch64")
    run("ctest", "--preset", "aarch64", *words, env={**os.environ, "SHORT_TESTS": "1"})


# ---- the wheel


def symbols(library: Path, which: str) -> Iterator[tuple[str, str]]:
    """The name and version of each symbol that the library defines or lacks. Weak ones may be
    missing."""
    for line in lines("aarch64-linux-gnu-nm", "-D", which, library):
        *_, kind, symbol = line.split()
        name, _, version = symbol.partition("@")
        if which == "--defined-only" or kind not in "wv":
            yield name, version.lstrip("@")


def make_stubs(folder: Path, libraries: list[Path]) -> None:
    """Libraries with the names, versions and functions of those that torch needs and that are not
    there. The functions return 0."""
    system = [path for path in SYSROOT.rglob("lib/aarch64-linux-gnu/*.so*") if path.suffix != ".py"]
    defined = {name for path in libraries + system for name, _ in symbols(path, "--defined-only")}
    known = {path.name for path in libraries + system} | {"ld-linux-aarch64.so.1"}
    owners: dict[str, str] = {}  # of versions
    missing: dict[str, set[str]] = {}
    for path in libraries:
        owner = ""
        for line in lines("aarch64-linux-gnu-readelf", "-dVW", path):
            if found := re.search(r"\(NEEDED\).*\[(.*)\]", line):
                if found[1] not in known:
                    missing.setdefault(found[1], set())
            elif found := re.search(r"File: (\S+)", line):
                owner = found[1]
            elif found := re.search(r"Name: (\S+) +Flags", line):
                owners[found[1]] = owner
    versions: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in libraries:
        for name, version in symbols(path, "--undefined-only"):
            owner = owners.get(version, next(iter(missing)))  # without a version: from any library
            if name not in defined and owner in missing:
                versions[owner][version].add(name)
    folder.mkdir(parents=True)
    for library in missing:
        text, script = ".text\nempty: mov x0, #0\nret\n", ""
        for version, names in versions[library].items():
            for name in sorted(names):
                text += f".globl {name}\n.type {name}, %function\n.set {name}, empty\n"
            if version:
                script += f"{version} {{ {' '.join(f'{name};' for name in sorted(names))} }};\n"
        (folder / "empty.s").write_text(text)
        (folder / "versions").write_text(script)
        command = ["aarch64-linux-gnu-gcc", "-shared", "-nostdlib", f"-Wl,-soname,{library}"]
        command += [f"-Wl,--version-script,{folder}/versions"] if script else []
        run(*command, folder / "empty.s", "-o", folder / library)


def make_site() -> None:
    if (SITE / "stubs").exists():
        return
    say(f"fetching torch {TORCH} and what it needs, for Arm")
    shutil.rmtree(SITE, ignore_errors=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "-q",
        "--disable-pip-version-check",
        "install",
        "--target",
        SITE,
    ]
    pip += ["--only-binary", ":all:", "--python-version", "3.11", "--no-compile"]
    for glibc in ("2_28", "2_27", "2_17"):
        pip += ["--platform", f"manylinux_{glibc}_aarch64"]
    run(*pip, *MODULES.split())
    run(*pip, "--no-deps", f"torch=={TORCH}")
    make_stubs(SITE / "stubs", sorted((SITE / "torch/lib").glob("*.so*")))


def try_wheel(wheel: Path, words: list[str]) -> None:
    make_site()
    installed = BUILD / "aarch64-wheel"
    shutil.rmtree(installed, ignore_errors=True)
    shutil.unpack_archive(wheel, installed, "zip")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{installed}:{SITE}:{ROOT}/tests",
        "LD_LIBRARY_PATH": f"{SITE}/stubs",
    }
    python = SYSROOT / "usr/bin/python3.11"
    run(RUN, python, ROOT / ".ci/smoke.py", BUILD / "aarch64-store", env=environment)
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "1200"]
    run(RUN, python, *pytest, *(words or SELECTION), env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev arm", description=__doc__.split("\n")[0])
    parser.add_argument("--wheel", type=Path, help="try this wheel instead of the C++ tests")
    options, words = parser.parse_known_args()
    prepare()
    make_sysroot()
    if options.wheel:
        try_wheel(options.wheel.resolve(), words)
    else:
        test_engine(words)


main()
