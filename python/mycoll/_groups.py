"""What mycoll needs of torch's own code: the backends of a group, and to replace functions."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from mycoll._native import native

CPU = torch.device("cpu")


def members(group: ProcessGroup | None) -> ProcessGroup:
    """The group, or the default group in its place."""
    return distributed_c10d._get_default_group() if group is None else group


def unwrapped(backend: Any) -> Any:
    """The backend without the wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL puts around it."""
    return getattr(backend, "wrapped_pg", backend)


def backend_of(group: ProcessGroup | None, device: torch.device = CPU) -> Any | None:
    """mycoll's backend that serves the group's tensors on this device; None: another one does.

    It may be known to torch under another name (MYCOLL_REPLACE).

    Raises:
        RuntimeError: The group has no backend for this device.
    """
    backend = unwrapped(members(group)._get_backend(device))
    return backend if isinstance(backend, native().MycollBackend) else None


def own_backend(group: ProcessGroup | None, device: torch.device = CPU) -> Any:
    """As backend_of().

    Raises:
        ValueError: It is another backend.
    """
    backend = backend_of(group, device)
    if backend is None:
        other = dist.get_backend(group)
        raise ValueError(
            f"{other!r} serves the group's tensors on {device}, not mycoll: use that backend's own "
            "functions"
        )
    return backend


def once(function: Callable[[], None]) -> Callable[[], None]:
    """Lets only the first call in a process run. Other threads that call it meanwhile wait."""
    lock, cached = threading.RLock(), functools.cache(function)

    @functools.wraps(function)
    def call() -> None:
        with lock:
            cached()

    return call


def replace(
    name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], module: Any = None
) -> None:
    """Wraps the function of torch.distributed, or of this module, if this torch has it."""
    original = getattr(module or distributed_c10d, name, None)
    if original is not None:
        rebind(name, original, functools.wraps(original)(wrap(original)))


def rebind(name: str, original: Any, new: Any) -> None:
    """Replaces `original` by `new` in all modules that have it under this name."""
    # A program, or torch's device_mesh, may have imported it. Looks at the real types and the real
    # dictionaries of modules: lazy modules would otherwise run their code, and objects that only
    # pretend to be modules (cffi's libraries) have no dictionary.
    dictionary = vars(ModuleType)["__dict__"]
    for module in list(sys.modules.values()):
        if issubclass(type(module), ModuleType):
            names = dictionary.__get__(module) or {}
            if names.get(name) is original:
                names[name] = new
