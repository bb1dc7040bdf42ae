"""From torch's groups to mycoll's backends."""

from __future__ import annotations

from typing import Any

import torch
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
