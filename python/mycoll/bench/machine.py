"""The machine, the versions and the settings: the header row of every result."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Collection
from pathlib import Path

import torch

from mycoll._native import native_module
from mycoll._version import __version__
from mycoll.bench.options import Options

_ASSUMED_CACHE_BYTES = 32 << 20
_ENVIRONMENT_PREFIXES = ("MYCOLL_", "GLOO_", "NCCL_", "OMP_", "OMPI_", "MPIR_", "TORCH_", "UCX_")
_SECRETS = ("SECRET", "TOKEN", "KEY", "PASSWORD")


def last_level_cache_bytes(cpus: Collection[int]) -> int:
    """All last-level caches together that these cores can fill."""
    caches: dict[tuple[int, str], int] = {}
    for cpu in cpus:
        for index in Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            try:
                level = int((index / "level").read_text())
                shared = (index / "shared_cpu_list").read_text().strip()
                size = (index / "size").read_text().strip()
            except (OSError, ValueError):
                continue
            caches[level, shared] = int(size.rstrip("K")) << 10 if size.endswith("K") else int(size)
    if not caches:
        return _ASSUMED_CACHE_BYTES
    last = max(level for level, _ in caches)
    return sum(size for (level, _), size in caches.items() if level == last)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())


def _cpu_quota() -> float | None:
    """Cores a cgroup grants, where it grants less than the affinity shows."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def header(
    options: Options, argv: list[str], ranks: int, hosts: int, cache_bytes: int
) -> dict[str, object]:
    """The first record of the results. Secrets are left out: results are published."""
    machine: dict[str, object] = {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "cpu_quota": _cpu_quota(),
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
