"""Memory that NCCL reads and writes without a copy.

Groups whose CUDA tensors travel through host memory need nothing of the kind: there, registering
does nothing.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup, distributed_c10d

from mycoll._groups import own_backend, unwrapped
from mycoll._native import native, nccl_wheel

if TYPE_CHECKING:
    from mycoll._C import MycollBackend
else:
    MycollBackend = object


# Of allocate_tensor(): by group, as each registers memory with a communicator of its own. Not by
# backend: torch makes a new Python object of that each time it is asked for it.
_pools: weakref.WeakKeyDictionary[ProcessGroup, _Pool] = weakref.WeakKeyDictionary()


def nccl_mem_pool() -> torch.cuda.MemPool:
    """Makes a pool of memory from NCCL's own allocator.

    NCCL reads and writes such memory without a copy once it is registered, and makes symmetric
    windows of it.

    Returns:
        The pool, for torch.cuda.use_mem_pool().

    Raises:
        RuntimeError: NCCL is not there, or too old to allocate memory.

    Example:
        pool = mycoll.nccl_mem_pool()
        with torch.cuda.use_mem_pool(pool):
            bucket = torch.empty(1 << 20, device="cuda")
        mycoll.register_mem_pool(pool)
    """
    return torch.cuda.MemPool(nccl_allocator())


def nccl_allocator() -> Any:
    """Returns NCCL's allocator, for torch.cuda.MemPool()."""
    module = native()
    module.set_nccl_wheel(nccl_wheel())
    module._require_nccl_memory()
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        str(module.__file__), "mycoll_nccl_alloc", "mycoll_nccl_free"
    )
    return allocator.allocator()


def register_mem_pool(
    pool: torch.cuda.MemPool, group: ProcessGroup | None = None, symmetric: bool = False
) -> None:
    """Registers the current contents of a pool with NCCL's communicator of a group.

    Does nothing for groups whose CUDA tensors travel through host memory.

    Args:
        pool: The pool, such as one of `nccl_mem_pool()`.
        group: The group; `None`: the world.
        symmetric: Whether to register symmetric windows: all ranks must then register pools with
            the same segments, in the same order.

    Raises:
        ValueError: Another backend than mycoll serves the group's tensors on this device.

    Example:
        mycoll.register_mem_pool(pool, symmetric=True)
    """
    for segment in pool.snapshot():
        _register(own_backend(group, _device(segment)), segment, symmetric)


def deregister_mem_pool(pool: torch.cuda.MemPool, group: ProcessGroup | None = None) -> None:
    """Undoes `register_mem_pool()`. Call it before the memory of the pool is freed.

    Args:
        pool: The pool that was registered.
        group: The group that it was registered with; `None`: the world.

    Raises:
        ValueError: Another backend than mycoll serves the group's tensors on this device.

    Example:
        mycoll.deregister_mem_pool(pool)
    """
    for segment in pool.snapshot():
        own_backend(group, _device(segment))._deregister_memory(segment["address"])


class BackendMemory(MycollBackend):
    """The methods of MycollBackend that have the names of torch's nccl: csrc/bindings adds them."""

    @property
    def mem_allocator(self) -> Any:
        """NCCL's allocator, for torch.cuda.MemPool(). Raises RuntimeError if NCCL has none."""
        return nccl_allocator()

    def register_mem_pool(self, pool: torch.cuda.MemPool, symm: bool = False) -> None:
        """Registers a pool as mycoll.register_mem_pool() does.

        Args:
            pool: A torch.cuda.MemPool.
            symm: Whether all ranks register a pool with the same segments, in the same order.

        Raises:
            ArgumentError: The memory is registered already, with other arguments.
        """
        for segment in pool.snapshot():
            _register(self, segment, symm)

    def deregister_mem_pool(self, pool: torch.cuda.MemPool) -> None:
        """Undoes `register_mem_pool()`.

        Args:
            pool: The pool that was registered.

        Raises:
            ArgumentError: It is not registered.
        """
        for segment in pool.snapshot():
            self._deregister_memory(segment["address"])

    def supports_tensor_alloc(self, device: torch.device | str) -> bool:
        """Returns whether `allocate_tensor()` has memory for a device.

        Args:
            device: A torch.device.

        Returns:
            True once the group's tensors travel through an NCCL that allocates memory.
        """
        return _group_of(self, torch.device(device)) is not None

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        """Makes an uninitialised tensor in memory that NCCL reads and writes without a copy.

        Args:
            size: The number of elements.
            dtype: The dtype of the tensor.
            device: The device of the tensor.

        Returns:
            The tensor, with one dimension.

        Raises:
            ValueError: `supports_tensor_alloc()` is false for the device.
        """
        device = torch.device(device)
        group = _group_of(self, device)
        if group is None:
            raise ValueError(
                f"the group has no memory of NCCL's for {device}: its tensors there do not travel "
                "through NCCL, or do not yet; ask supports_tensor_alloc() first"
            )
        if group not in _pools:
            _pools[group] = _Pool()
        return _pools[group].allocate(self, size, dtype, device)


class _Pool:
    """Memory of one group, and which of it is registered."""

    def __init__(self) -> None:
        self._pool = nccl_mem_pool()
        self._registered: list[range] = []
        self._lock = threading.Lock()

    def allocate(
        self, backend: MycollBackend, size: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        with self._lock:
            with torch.cuda.use_mem_pool(self._pool, device):
                tensor = torch.empty(size, dtype=dtype, device=device)
            if size and not any(tensor.data_ptr() in each for each in self._registered):
                backend.register_mem_pool(self._pool)
                self._registered = [
                    range(each["address"], each["address"] + each["total_size"])
                    for each in self._pool.snapshot()
                ]
            return tensor


def _group_of(backend: MycollBackend, device: torch.device) -> ProcessGroup | None:
    """The group of torch's that this is the backend of; None where NCCL has no memory for it, or it
    has been destroyed."""
    if device.type == "cuda" and backend.device_transport() == "nccl":
        with contextlib.suppress(RuntimeError):
            native()._require_nccl_memory()
            for group in distributed_c10d._world.pg_map:
                serves = torch.device(device.type) in group._device_types
                if serves and unwrapped(group._get_backend(device)) is backend:
                    return group
    return None


def _register(backend: MycollBackend, segment: dict[str, Any], symmetric: bool) -> None:
    backend._register_memory(
        str(_device(segment)), segment["address"], segment["total_size"], symmetric
    )


def _device(segment: dict[str, Any]) -> torch.device:
    return torch.device(segment.get("device_type", "cuda"), segment["device"])
