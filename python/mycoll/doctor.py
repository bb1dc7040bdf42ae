"""`mycoll doctor`: whether mycoll can work here, what it will use, and how to fix what is wrong.

Each check is a function that yields findings. The exit code is 1 when one is a FAIL; a WARN leaves
it at 0. Checks in NEED_MODULE are left out where the compiled module does not load: check_torch
says how to fix that, and they could only repeat it.
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
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mycoll import _gloo, _terminal
from mycoll._native import native, native_module, unknown_variables
from mycoll._units import show_size
from mycoll._version import __version__
from mycoll.launch import SpawnError, spawn

OK, WARN, FAIL = "ok", "WARN", "FAIL"
MIB = 1 << 20
DESCRIPTORS = 1024  # two for each connected rank, and the program's own
ELSEWHERE = "192.0.2.1"  # reserved for examples; only the route to it is looked up
TEST_SECONDS = 90
INDENT = 17  # status and name


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    name: str
    text: str
    status: str = OK
    fix: str = ""


def main(words: Sequence[str] = ()) -> int:
    """Runs `mycoll doctor` with these words; returns the exit code."""
    parser = _terminal.Parser(
        prog="mycoll doctor",
        description="Checks whether mycoll can work on this machine, says how to fix what is "
        "wrong, and runs two ranks over shared memory and over sockets.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    as_json = parser.parse_args(words).json
    results: list[Result] = []
    progress = _terminal.Progress(not as_json)
    for check in CHECKS:
        progress.show(f"checking: {title(check)}")
        for result in examine(check):
            results.append(result)
            progress.hide()
            if not as_json:
                show(result)
    failed = sum(each.status == FAIL for each in results)
    warned = sum(each.status == WARN for each in results)
    if as_json:
        rows = [asdict(each) for each in results]
        print(json.dumps({"ok": not failed, "findings": rows}, indent=2))
    else:
        print(f"\nproblems: {failed}, warnings: {warned}")
    return 1 if failed else 0


def title(check: Check) -> str:
    """The name of a check in messages."""
    return check.__name__.replace("check_", "")


def examine(check: Check) -> Iterator[Result]:
    """Runs a check. An exception in it is one of its results, not the end of the report."""
    if check in NEED_MODULE and native_module() is None:
        text = "not checked: it needs the compiled module, see torch"
        yield Result(title(check), text, WARN, "fix that first")
        return
    try:
        yield from check()
    except Exception as error:
        text = f"the check itself failed: {error!r}"
        yield Result(title(check), text, WARN, "report this to mycoll's authors")


def show(result: Result) -> None:
    """Prints a result: its status, its name, its text and the fix."""
    colour = {OK: "green", WARN: "yellow", FAIL: "red"}[result.status]
    text = result.text + (f"\nfix: {result.fix}" if result.fix else "")
    first, *more = _terminal.wrapped(text, INDENT)
    print(f"{_terminal.paint(f'{result.status:4}', colour)}  {result.name:10} {first}")
    for line in more:
        print(f"{'':{INDENT}}{line}", flush=True)


# --- the software ---------------------------------------------------------------------------------


def check_torch() -> Iterator[Result]:
    """Yields whether the compiled module fits the torch that is installed."""
    import torch
    import torch.distributed as dist

    yield Result("mycoll", f"{__version__}, {Path(__file__).parent}")
    if not dist.is_available():
        text = f"{torch.__version__} is built without torch.distributed"
        yield Result("torch", text, FAIL, "install a torch wheel from pytorch.org")
        return
    try:
        built = native().torch_version
    except ImportError as error:
        problem = getattr(error, "problem", str(error))
        fix = getattr(error, "fix", "install mycoll again")
        yield Result("torch", f"{torch.__version__}: {problem}", FAIL, fix)
        return
    minor = ".".join(str(built).split(".")[:2])
    yield Result("torch", f"{torch.__version__}, matches the build ({minor})")


def check_interpreter() -> Iterator[Result]:
    """Yields the Python and the system."""
    name = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    yield Result("python", name)
    yield Result("system", f"{platform.system()} {platform.release()}, {platform.machine()}")


def nccl_file() -> str:
    """The NCCL that torch calls, of several that may be loaded; "" where it is inside libtorch."""
    everything, info = ctypes.CDLL(None), (ctypes.c_char_p * 4)()  # a Dl_info: the file is first
    library = everything  # where it is global: preloaded, or in a wheel that torch opened so
    if not hasattr(library, "ncclGetVersion"):
        try:
            library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            return ""
    address = ctypes.cast(library.ncclGetVersion, ctypes.c_void_p)
    return (info[0] or b"").decode() if everything.dladdr(address, info) else ""


def nccl_version() -> tuple[int, int, int]:
    """The version of that library: torch may report the one that it was built with."""
    import torch

    number = ctypes.c_int()
    if (file := nccl_file()) and ctypes.CDLL(file).ncclGetVersion(ctypes.byref(number)) == 0:
        return number.value // 10000, number.value // 100 % 100, number.value % 100
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return major, minor, patch


def check_nccl() -> Iterator[Result]:
    """Yields which NCCL serves CUDA tensors."""
    import torch.distributed as dist

    if not dist.is_nccl_available():
        yield Result("nccl", "not in this torch (CPU tensors need none)")
        return
    version = ".".join(map(str, nccl_version()))
    where = nccl_file() or "inside libtorch"
    packages = []
    for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages.append(f"{name} {importlib.metadata.version(name)}")
    text = f"{version}, {where} ({', '.join(packages) or 'from no package'})"
    text += "\nserves CUDA tensors, unless MYCOLL_CUDA=host"
    fix = "pip uninstall the one that torch does not require: both write the same file"
    yield Result("nccl", text, WARN, fix) if len(packages) > 1 else Result("nccl", text)


def check_variables() -> Iterator[Result]:
    """Yields the MYCOLL_* variables that are set, and those that are unknown."""
    for name, hint in unknown_variables():
        yield Result("variables", f"{name} is unknown and has no effect", WARN, hint)
    rows = [entry for entry in native().environment() if entry["source"] != "default"]
    words = sorted(f"{entry['source']}={entry['value']}" for entry in rows)
    yield Result("variables", ", ".join(words) if words else "all MYCOLL_* at their defaults")
    if _gloo.is_replaced():
        yield Result("variables", "mycoll is in gloo's place: groups called gloo are mycoll's")
    if "MYCOLL_CPU=gloo" in words:
        fix = "unset MYCOLL_CPU when the comparison is over"
        yield Result("variables", "CPU tensors go over torch's gloo", WARN, fix)


# --- the machine ----------------------------------------------------------------------------------


def check_network() -> Iterator[Result]:
    """Yields the interface that is chosen, and what the name of this host resolves to."""
    variable = "MYCOLL_SOCKET_IFNAME"
    wanted = os.environ.get(variable, "")
    store = os.environ.get("MASTER_ADDR", "")
    names = sorted(name for _, name in socket.if_nameindex())
    try:
        chosen, own_address = native().choose_interface(store or ELSEWHERE)[0]
    except RuntimeError as error:
        fix = f"export {variable}={names[0]}, or unset it" if names else "ip link set lo up"
        yield Result("network", str(error), FAIL, fix)
        return
    why = f"as it leads to MASTER_ADDR={store}" if store else ""
    why = f"as {variable}={wanted} says" if wanted else why
    text = f"{chosen} {own_address} {why}".rstrip()
    yield Result("network", f"{text}, of the interfaces {', '.join(names)}")

    name = socket.gethostname()
    try:
        known = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        known.sort(key=lambda each: each[0] != socket.AF_INET)
        address = str(known[0][4][0])
    except OSError:
        fix = f"echo '{own_address} {name}' >> /etc/hosts, or give MASTER_ADDR as an address"
        yield Result("hostname", f"{name} does not resolve", WARN, fix)
        return
    if address.startswith("127.") and not own_address.startswith(("127.", "::1")):
        text = f"{name} resolves to {address}, which other hosts cannot reach"
        fix = f"for jobs on several hosts: export {variable}={chosen}"
        fix += f", and MASTER_ADDR={own_address} if rank 0 is here"
        yield Result("hostname", text, OK if wanted else WARN, "" if wanted else fix)
    else:
        yield Result("hostname", f"{name} resolves to {address}")


def check_memory() -> Iterator[Result]:
    """Yields whether memory can be shared, and the limits of this process."""
    try:
        with os.fdopen(os.memfd_create("mycoll-doctor", os.MFD_ALLOW_SEALING), "wb") as file:
            file.truncate(MIB)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield Result("shm", "sealed memfd works; /dev/shm and its size limit are not used")
    except OSError as error:
        fix = "allow memfd_create in the container's seccomp profile, or MYCOLL_TRANSPORT=tcp"
        yield Result("shm", f"no sealed memfd: {error}", FAIL, fix)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY:
        text = f"files, and with them shared memory, are limited to {limit // MIB} MiB"
        yield Result("shm", text, WARN, "ulimit -f unlimited")

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} file descriptors ({hard} at most)"
    status = FAIL if soft < 64 else WARN if soft < DESCRIPTORS else OK
    fix = f"ulimit -n {max(soft, min(hard, 65536))}" if status != OK else ""
    if fix and hard < DESCRIPTORS:
        fix = "raise the hard limit: limits.conf, LimitNOFILE=, or docker run --ulimit nofile=65536"
    yield Result("limits", text, status, fix)
    if hasattr(os, "pidfd_open"):
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError as error:
            text = f"no pidfd_open ({error}): the death of a rank may be noticed later"
            yield Result("limits", text, WARN, "allow pidfd_open in the seccomp profile")


def check_cores() -> Iterator[Result]:
    """Yields how many cores the ranks may use."""
    cores = native().usable_cores()
    text = f"{cores} of {os.cpu_count()} usable (affinity and the cgroup's quota)"
    if cores >= 2:
        yield Result("cores", f"{text}: up to {cores} ranks may spin while they wait")
        return
    fix = "give the job a core for each rank (taskset, --cpus-per-task, docker run --cpus)"
    yield Result("cores", f"{text}: ranks take turns", WARN, fix)


def check_ranks() -> Iterator[Result]:
    """Yields the layout of the ranks, where a launcher has set WORLD_SIZE and LOCAL_WORLD_SIZE."""
    try:
        ranks = int(os.environ["WORLD_SIZE"])
        here = int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return
    if not 0 < here < ranks or ranks % here:
        return
    text = f"{ranks // here} hosts of {here} ranks"
    block = native()._better_sum_block([here] * (ranks // here))
    fix = f"export MYCOLL_SUM_BLOCK={block} on all of them" if block else ""
    text += ", which send more than one partial sum each" if block else ""
    yield Result("ranks", text, WARN if block else OK, fix)


# --- a real group ---------------------------------------------------------------------------------


def check_transports() -> Iterator[Result]:
    """Yields the result of two ranks over shared memory, and over sockets."""
    for transport in ("shm", "tcp"):
        fix = f"look at the log: MYCOLL_LOG=debug mycoll doctor; to do without {transport}: "
        fix += "MYCOLL_TRANSPORT=tcp" if transport == "shm" else "MYCOLL_TRANSPORT=shm"
        name = f"2 ranks, {transport}"
        settings = {"MYCOLL_TRANSPORT": transport, "MYCOLL_CPU": "engine"}
        settings |= {"OMP_NUM_THREADS": "1", "MYCOLL_TRACE_FILE": "off"}
        try:
            reports = spawn(self_test, 2, env=settings, timeout=TEST_SECONDS)
        except Exception as error:
            cause = error.cause if isinstance(error, SpawnError) else str(error)
            yield Result("self-test", f"{name}: {cause}", FAIL, fix)
            continue
        wrong, (_, used, cipher, copies) = sum(number for number, *_ in reports), reports[0]
        text = f"{name}: all_reduce, broadcast, all_gather, send and recv: {wrong} wrong"
        text += f", encrypted: {cipher}" if cipher else ""
        if wrong:
            fix = "report this to mycoll's authors; until then MYCOLL_CPU=gloo"
        elif used != transport:
            text += f", but over {used}"
        is_good = not wrong and used == transport
        yield Result("self-test", text) if is_good else Result("self-test", text, FAIL, fix)
        if used == "shm":
            yield Result("copies", describe_copies(copies))


def describe_copies(copies: list[tuple[str, int, int, float, float, bool]]) -> str:
    """Describes what was measured about reading another rank's tensors through the kernel."""
    if not copies:
        use = next(e["value"] for e in native().environment() if e["name"] == "MYCOLL_SINGLE_COPY")
        reason = "the kernel does not permit it" if use == "auto" else f"MYCOLL_SINGLE_COPY={use}"
        return f"single copy was not measured: {reason}"
    by_kind: dict[str, list[str]] = {}
    for kind, _, size, staged, direct, is_used in copies:
        times = f"{show_size(size)} {direct / staged:.2f}{' (used)' if is_used else ''}"
        by_kind.setdefault(kind, []).append(times)
    parts = [f"{kind} {', '.join(times)}" for kind, times in by_kind.items()]
    return "single copy, time relative to staging: " + "; ".join(parts)


def self_test() -> tuple[int, str, str, list[tuple[str, int, int, float, float, bool]]]:
    """Runs some operations on one of two ranks; returns how many elements were wrong, the
    transport, its encryption and what was measured about single copies."""
    import torch
    import torch.distributed as dist

    rank, wrong = dist.get_rank(), 0
    for numel in 4 * (MIB // 64, MIB // 4, 4 * MIB):
        ramp = torch.arange(numel, dtype=torch.float32) % 1021
        total, copy, message = ramp + rank, ramp * (1 - rank), ramp * rank
        parts = [torch.empty_like(ramp) for _ in range(2)]
        dist.all_reduce(total)
        dist.broadcast(copy, 0)
        dist.all_gather(parts, ramp + rank)
        for _ in range(16):  # enough to measure messages
            dist.send(message, 0) if rank == 1 else dist.recv(message, 1)
        results = [(total, 2 * ramp + 1), (copy, ramp), (message, ramp)]
        results += [(parts[0], ramp), (parts[1], ramp + 1)]
        wrong += sum(int((found != expected).sum()) for found, expected in results)
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    return wrong, backend.transport(), backend.encryption(), native()._single_copies()


Check = Callable[[], Iterator[Result]]
NEED_MODULE: tuple[Check, ...] = (check_variables, check_network, check_cores, check_ranks)
NEED_MODULE += (check_transports,)
CHECKS: tuple[Check, ...] = (check_torch, check_interpreter, *NEED_MODULE[:2], check_memory)
CHECKS += (check_cores, check_ranks, check_nccl, check_transports)
