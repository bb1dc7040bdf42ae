"""`mycoll doctor`: whether mycoll can work here, what will be used, and how to mend what is wrong.

Each check is a function that yields findings. The exit code is 1 when one is a FAIL; a WARN leaves
it at 0. Those in NEED_MODULE are left out where the compiled module does not load: check_torch says
how to mend that, and they could only say it again, in other words.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mycoll import _interfaces
from mycoll._registration import native
from mycoll._version import __version__
from mycoll.launch import spawn

OK, WARN, FAIL = "ok", "WARN", "FAIL"
MIB = 1 << 20
DESCRIPTORS = 1024  # two for each peer that is talked to, and the program's own
TEST_SECONDS = 90
RETRY = "then run `mycoll doctor` again"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    text: str
    status: str = OK
    fix: str = ""


def main(as_json: bool) -> int:
    findings: list[Finding] = []
    usable = is_usable()
    for check in CHECKS:
        is_skipped = check in NEED_MODULE and not usable
        for finding in [skipped(check)] if is_skipped else examine(check):
            findings.append(finding)
            if not as_json:
                show(finding)
    failed = sum(each.status == FAIL for each in findings)
    warned = sum(each.status == WARN for each in findings)
    if as_json:
        rows = [asdict(each) for each in findings]
        print(json.dumps({"ok": not failed, "findings": rows}, indent=2))
    elif failed or warned:
        print(f"\n{failed} to mend, {warned} to know about")
    else:
        print("\nall well")
    return 1 if failed else 0


def is_usable() -> bool:
    try:
        native()
    except ImportError:
        return False
    return True


def title(check: Callable[[], Iterator[Finding]]) -> str:
    return check.__name__.replace("check_", "")


def skipped(check: Callable[[], Iterator[Finding]]) -> Finding:
    text = "not looked at: it needs the compiled module, see torch"
    return Finding(title(check), text, WARN, "mend that first")


def examine(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """A check that breaks is a finding, not the end of the report."""
    try:
        return list(check())
    except Exception as error:
        text = f"the check itself failed: {error!r}"
        return [Finding(title(check), text, WARN, "tell mycoll's authors")]


def show(finding: Finding) -> None:
    first, *more = finding.text.splitlines() or [""]
    width = max(60, min(100, shutil.get_terminal_size().columns)) - 16
    print(f"{finding.name:10} {first:{width}} {finding.status}")
    for line in more:
        print(f"{'':10} {line}")
    if finding.fix:
        print(f"{'':10} fix: {finding.fix}", flush=True)


# --- the software ---------------------------------------------------------------------------------


def check_torch() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    yield Finding("mycoll", f"{__version__}, {Path(__file__).parent}")
    if not dist.is_available():
        text = f"{torch.__version__} is built without torch.distributed"
        yield Finding("torch", text, FAIL, "install a torch wheel from pytorch.org")
        return
    try:
        built = native().torch_version
    except ImportError as error:
        message = str(error)
        fix = message[message.find("run `") :] if "run `" in message else "build mycoll again"
        yield Finding("torch", f"{torch.__version__}: {message}", FAIL, f"{fix}, {RETRY}")
        return
    minor = ".".join(str(built).split(".")[:2])
    yield Finding("torch", f"{torch.__version__}, matches the build ({minor})")
    if "mycoll" not in dist.Backend.backend_list:
        yield Finding("torch", "does not know the backend", FAIL, "import mycoll in your program")


def check_interpreter() -> Iterator[Finding]:
    name = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    yield Finding("python", name)
    text = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform == "linux":
        yield Finding("system", text)
    else:
        yield Finding("system", text, FAIL, "mycoll runs on Linux; elsewhere use gloo")


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def file_of_function(name: str) -> str:
    """The library whose function torch calls by this name, of several that may be loaded."""
    everything, info = ctypes.CDLL(None), _DlInfo()
    if not hasattr(everything, name):
        return ""
    address = ctypes.cast(getattr(everything, name), ctypes.c_void_p)
    return info.file.decode() if everything.dladdr(address, ctypes.byref(info)) else ""


def check_nccl() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        yield Finding("nccl", "not in this torch (CPU tensors need none)")
        return
    version = ".".join(map(str, torch.cuda.nccl.version()))
    where = file_of_function("ncclGetVersion") or "inside libtorch"
    packages = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
        if _is_installed(name)
    ]
    text = f"{version}, {where} ({', '.join(packages) or 'from no package'})"
    text += "\nserves CUDA tensors, unless MYCOLL_CUDA=host"
    if len(packages) > 1:
        fix = "pip uninstall the one that torch does not require: both write the same file"
        yield Finding("nccl", text, WARN, fix)
    else:
        yield Finding("nccl", text)


def _is_installed(name: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(name)
        return True
    return False


def check_variables() -> Iterator[Finding]:
    for name, near in native().unknown_variables():
        fix = f"did you mean {near}?" if near else "unset it; `mycoll env` lists all"
        yield Finding("variables", f"{name} is not known, and without effect", WARN, fix)
    rows = [entry for entry in native().environment() if entry["source"] != "default"]
    words = sorted(f"{entry['source']}={entry['value']}" for entry in rows)
    yield Finding("variables", ", ".join(words) if words else "all MYCOLL_* at their defaults")
    for entry in rows:
        yield from file_of(str(entry["name"]), Path(str(entry["value"])))
    if "MYCOLL_CPU=gloo" in words:
        fix = "unset MYCOLL_CPU when the comparison is over"
        yield Finding("variables", "CPU tensors go over torch's gloo", WARN, fix)


WRITTEN = ("MYCOLL_LOG_FILE", "MYCOLL_TRACE_FILE")


def file_of(variable: str, path: Path) -> Iterator[Finding]:
    """Whether a file can be where a variable says; nobody would tell before it is missed."""
    folder = path.parent
    if variable in WRITTEN and str(path) not in ("", "off", ".") and "%" not in str(folder):
        if not os.access(folder, os.W_OK | os.X_OK):
            text = f"{variable}={path}: no file can be written in {folder}"
            yield Finding("variables", text, WARN, f"mkdir -p {folder}, or another place")
    elif variable == "MYCOLL_SECRET_FILE" and not os.access(path, os.R_OK):
        yield Finding("variables", f"{variable}={path} cannot be read", WARN, "see its permissions")


# --- the machine ----------------------------------------------------------------------------------


def check_network() -> Iterator[Finding]:
    found = _interfaces.interfaces()
    variable = "MYCOLL_SOCKET_IFNAME"
    wanted = os.environ.get(variable, "")
    host = os.environ.get("MASTER_ADDR") or _interfaces.ELSEWHERE
    chosen, why = _interfaces.choose(found, wanted, host)
    all_names = ", ".join(f"{each.name} {each.address}" for each in found) or "none"
    if chosen is None:
        names = sorted({each.name for each in found})
        fix = f"export {variable}={names[0]}, or unset it" if names else "ip link set lo up"
        yield Finding("network", f"nothing to use ({why}); there are: {all_names}", FAIL, fix)
        return
    yield Finding("network", f"{chosen.name} {chosen.address}: {why}\nthere are: {all_names}")

    name = socket.gethostname()
    try:
        known = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        known.sort(key=lambda each: each[0] != socket.AF_INET)
        address = str(known[0][4][0])
    except OSError:
        fix = f"echo '{chosen.address} {name}' >> /etc/hosts, or use addresses for MASTER_ADDR"
        yield Finding("hostname", f"{name} does not resolve", WARN, fix)
        return
    real = next((each for each in found if not each.is_loopback and not each.is_bridge), None)
    if address.startswith("127.") and real is not None:
        text = f"{name} resolves to {address}, which other hosts cannot reach"
        fix = f"for jobs on several hosts: export {variable}={real.name}"
        fix += f", and MASTER_ADDR={real.address} if rank 0 is here"
        yield Finding("hostname", text, OK if wanted else WARN, "" if wanted else fix)
    else:
        yield Finding("hostname", f"{name} resolves to {address}")


def check_memory() -> Iterator[Finding]:
    try:
        descriptor = os.memfd_create("mycoll-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, MIB)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        finally:
            os.close(descriptor)
        yield Finding("shm", "sealed memfd works; /dev/shm and its size limit are not used")
    except OSError as error:
        fix = "allow memfd_create in the container's seccomp profile, or MYCOLL_TRANSPORT=tcp"
        yield Finding("shm", f"no sealed memfd: {error}", FAIL, fix)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY:
        text = f"files, and with them shared memory, are limited to {limit // MIB} MiB"
        yield Finding("shm", text, WARN, "ulimit -f unlimited")

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} file descriptors ({hard} at most)"
    status = FAIL if soft < 64 else WARN if soft < DESCRIPTORS else OK
    fix = f"ulimit -n {max(soft, min(hard, 65536))}" if status != OK else ""
    if fix and hard < DESCRIPTORS:
        fix = "raise the hard limit: limits.conf, LimitNOFILE=, or docker run --ulimit nofile=65536"
    yield Finding("limits", text, status, fix)
    if hasattr(os, "pidfd_open"):
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError as error:
            text = f"no pidfd_open ({error}): a rank's death may be noticed later"
            yield Finding("limits", text, WARN, "allow pidfd_open in the seccomp profile")


def check_cores() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0))
    text = f"{usable} of {os.cpu_count()} usable by this process"
    quota = cgroup_cores()
    if quota is not None:
        text += f", of which the cgroup grants the time of {quota:g}"
    cores = min(usable, quota or usable)
    if cores < 2:
        fix = "give the job a core for each rank (taskset, --cpus-per-task, docker run --cpus)"
        yield Finding("cores", f"{text}: ranks will take turns", WARN, fix)
    else:
        yield Finding("cores", f"{text}: up to {int(cores)} ranks may spin")


def cgroup_cores(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The CPU quota as a container sees it: at the root of its own cgroup tree."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota = (root / "cpu/cpu.cfs_quota_us").read_text()
        period = (root / "cpu/cpu.cfs_period_us").read_text()
        return None if int(quota) <= 0 else int(quota) / int(period)
    return None


def check_container() -> Iterator[Finding]:
    signs = {
        "/.dockerenv": "Docker",
        "/run/.containerenv": "Podman",
        "/singularity": "Apptainer",
        "/.singularity.d": "Apptainer",
    }
    kind = next((kind for path, kind in signs.items() if Path(path).exists()), "")
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        kind = "Kubernetes"
    if kind:
        text = f"{kind}\nranks share memory only within one network namespace"
        yield Finding("container", text)
    else:
        yield Finding("container", "none seen")


# --- a real group ---------------------------------------------------------------------------------


def check_transports() -> Iterator[Finding]:
    for transport in ("shm", "tcp"):
        fix = f"run it with logs: MYCOLL_LOG=debug mycoll doctor; to go on without {transport}: "
        fix += "MYCOLL_TRANSPORT=tcp" if transport == "shm" else "MYCOLL_TRANSPORT=shm"
        name = f"2 ranks, {transport}"
        settings = {
            "MYCOLL_TRANSPORT": transport,
            "MYCOLL_CPU": "engine",
            "OMP_NUM_THREADS": "1",
            "MYCOLL_TRACE_FILE": "off",
        }
        try:
            reports = spawn(self_test, 2, env=settings, timeout=TEST_SECONDS)
        except Exception as error:
            yield Finding("self-test", f"{name}: {error}", FAIL, fix)
            continue
        wrong = sum(report["wrong"] for report in reports)
        used = reports[0]["transport"]
        text = f"{name}: {reports[0]['micros']:.0f} us an all_reduce of 1 MiB, {wrong} wrong"
        if wrong:
            yield Finding(
                "self-test", text, FAIL, "tell mycoll's authors; MYCOLL_CPU=gloo helps on"
            )
        elif used != transport:
            yield Finding("self-test", f"{text}, but over {used}", FAIL, fix)
        else:
            yield Finding("self-test", text)


def self_test() -> dict[str, Any]:
    """On each rank: some of everything, counting elements that came out wrong."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    numel = MIB // 4
    ramp = torch.arange(numel, dtype=torch.float32) % 1021
    wrong = 0
    times = []
    for turn in range(20):
        values = ramp + rank + turn
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(values)
        times.append(time.perf_counter() - start)
        expected = size * (ramp + turn) + size * (size - 1) / 2
        wrong += int((values != expected).sum())

    everyone = [torch.empty(1000) for _ in range(size)]
    dist.all_gather(everyone, torch.full((1000,), float(rank)))
    wrong += sum(int((part != other).sum()) for other, part in enumerate(everyone))

    received = torch.empty(numel)
    sending = dist.isend(ramp + rank, (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    assert sending is not None
    sending.wait()
    wrong += int((received != ramp + (rank - 1) % size).sum())

    group: Any = dist.group.WORLD
    transport = group._get_backend(torch.device("cpu")).transport()
    return {"wrong": wrong, "transport": transport, "micros": sorted(times)[len(times) // 2] * 1e6}


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_torch,
    check_interpreter,
    check_variables,
    check_network,
    check_memory,
    check_cores,
    check_container,
    check_nccl,
    check_transports,
)
NEED_MODULE = (check_variables, check_transports)
