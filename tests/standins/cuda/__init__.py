"""Runs a torch that is built with CUDA on a machine without a GPU. The stand-ins replace NVIDIA's
runtime, driver and NCCL and must be preloaded (`preload()`); load() replaces torch's kernels with
the CPU's. Everything else is torch's own: streams, events, allocator, graphs, its nccl backend.
`./dev gpu --rehearse` runs the tests of device tensors this way."""

from __future__ import annotations

import atexit
import ctypes
import importlib.machinery
import importlib.util
from typing import Any

from standins.accelerator import folder

_native: Any = None


def preload() -> str:
    """The value for LD_PRELOAD."""
    where = folder()
    if where is None:
        raise RuntimeError("the stand-ins are not built; ./dev builds them and sets CPP_TEST_DIR")
    return f"{where}/libmycoll_standin_cuda.so:{where}/libnccl.so.2"


def is_here() -> bool:
    """Whether this process runs on the stand-in."""
    return hasattr(ctypes.CDLL(None), "mycoll_standin_cuda")


def load() -> None:
    """Replaces torch's kernels in this process; idempotent. Without it, kernels raise errors."""
    global _native
    where = folder()
    if _native is not None or where is None:
        return
    import torch  # noqa: F401  (the module is linked with it)

    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    spec = importlib.util.spec_from_file_location("_standin_cuda", where / f"_standin_cuda{suffix}")
    assert spec and spec.loader
    _native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_native)
    _native.load()
    atexit.register(_native.verify)
