"""Memory that NCCL reads and writes without a copy.

    pool = mycoll.nccl_mem_pool()
    with torch.cuda.use_mem_pool(pool):
        bucket = torch.empty(1 << 26, device="cuda")
    mycoll.register_mem_pool(pool)

Groups whose CUDA tensors travel through host memory need nothing of the kind: there, registering
does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from mycoll._registration import native, nccl_wheel

if TYPE_CHECKING:
    from mycoll._C import MycollBackend


def nccl_mem_pool() -> torch.cuda.MemPool:
    """A pool of memory from NCCL's own allocator, as symmetric memory has to be."""
    module = native()
    module.set_nccl_wheel(nccl_wheel())
    module._require_nccl_memory()
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        str(module.__file__), "mycoll_nccl_alloc", "mycoll_nccl_free"
    )
    return torch.cuda.MemPool(allocator.allocator())


def register_mem_pool(
    pool: torch.cuda.MemPool, group: ProcessGroup | None = None, symmetric: bool = False
) -> None:
    """Registers what `pool` holds now with NCCL's communicator of `group` (the world).

    symmetric: as windows, which all ranks must register alike: pools with the same segments, in the
    same order.
    """
    for segment in _segments(pool):
        device = torch.device(segment.get("device_type", "cuda"), segment["device"])
        _backend(group, device)._register_memory(
            str(device), segment["address"], segment["total_size"], symmetric
        )


def deregister_mem_pool(pool: torch.cuda.MemPool, group: ProcessGroup | None = None) -> None:
    """Undoes register_mem_pool(), before the pool's memory is freed."""
    for segment in _segments(pool):
        device = torch.device(segment.get("device_type", "cuda"), segment["device"])
        _backend(group, device)._deregister_memory(segment["address"])


def _segments(pool: Any) -> list[dict[str, Any]]:
    return list(pool.snapshot())


def _backend(group: ProcessGroup | None, device: torch.device) -> MycollBackend:
    members = distributed_c10d._get_default_group() if group is None else group
    backend = members._get_backend(device)
    # Under TORCH_DISTRIBUTED_DEBUG=DETAIL torch puts a wrapper around it.
    backend = getattr(backend, "wrapped_pg", backend)
    if not isinstance(backend, native().MycollBackend):
        raise ValueError(
            f"{dist.get_backend(group)!r} serves tensors on {device}, not mycoll: "
            "its own functions register memory"
        )
    return backend  # type: ignore[no-any-return]
