"""The machine, and the ranks of this run. They agree through a gloo group of their own, which no
case measures."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import platform
import socket
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mycoll._native import native_module
from mycoll._units import parse_size
from mycoll._version import __version__
from mycoll.bench.options import Options

_ASSUMED_CACHE_BYTES = 32 << 20
_ENVIRONMENT_PREFIXES = ("MYCOLL_", "GLOO_", "NCCL_", "OMP_", "OMPI_", "MPIR_", "TORCH_", "UCX_")
_SECRETS = ("SECRET", "TOKEN", "KEY", "PASSWORD")


def last_level_cache_bytes(cpus: Collection[int]) -> int:
    """All third-level caches together that these cores can fill."""
    sizes: dict[str, int] = {}  # by the cores that share a cache
    for cpu in cpus:
        cache = Path(f"/sys/devices/system/cpu/cpu{cpu}/cache/index3")
        with contextlib.suppress(OSError):
            size = parse_size((cache / "size").read_text())
            sizes[(cache / "shared_cpu_list").read_text()] = size
    return sum(sizes.values()) or _ASSUMED_CACHE_BYTES


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())


def header(
    options: Options, argv: list[str], ranks: int, hosts: int, cache_bytes: int
) -> dict[str, Any]:
    """The first record of the results. Secrets are left out: results are published."""
    machine: dict[str, object] = {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "last_level_cache_bytes": cache_bytes,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load_average_at_start": os.getloadavg()[0],
    }
    if options.device == "cuda":
        machine["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    environment = {
        name: "(set)" if any(secret in name for secret in _SECRETS) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(_ENVIRONMENT_PREFIXES)
    }
    return {
        "kind": "header",
        "schema": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine,
        "versions": {
            "mycoll": __version__ + ("" if native_module() else " (not built)"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "environment": environment,
        "arguments": argv,
        "ranks": ranks,
        "hosts": hosts,
        "device": options.device,
        "hot": options.hot,
        "memory": options.memory,
    }


T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """cache_bytes: the last-level caches of all cores on which this host's ranks may run."""

    rank: int
    size: int
    local_size: int
    hosts: int
    device: torch.device
    cache_bytes: int

    def synchronize(self) -> None:
        """Waits until the device has done what was called."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def barrier(self) -> None:
        """Blocks without spinning, so that others can be measured meanwhile."""
        dist.barrier()

    def share(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        box: list[T] = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def gather_all(self, value: T) -> list[T]:
        """Every rank's value on every rank."""
        boxes: list[T] = [value] * self.size
        dist.all_gather_object(boxes, value)
        return boxes


def missing_device(options: Options) -> str:
    """Why this process has no such device; '' if it has one."""
    try:
        kind = torch.device(options.device).type
    except RuntimeError:
        return f"--device: torch knows no '{options.device}'"
    is_here = kind == "cpu" or torch.accelerator.is_available()
    return "" if is_here else f"this machine has no {options.device} device"


def join(options: Options) -> World:
    """Makes the group in which the ranks of a launcher agree, unless it has made that itself."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    torch.set_num_threads(1)
    gc.disable()  # collected between cases instead: not while a clock runs
    device = torch.device("cpu")
    if options.device != "cpu":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device(options.device, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    patience = datetime.timedelta(seconds=10 * options.timeout_seconds)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=patience)
    me = (socket.gethostname(), os.sched_getaffinity(0))
    everybody = [me] * dist.get_world_size()
    dist.all_gather_object(everybody, me)
    neighbours = [cpus for name, cpus in everybody if name == me[0]]
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_size=len(neighbours),
        hosts=len({name for name, _ in everybody}),
        device=device,
        cache_bytes=last_level_cache_bytes(set().union(*neighbours)),
    )
