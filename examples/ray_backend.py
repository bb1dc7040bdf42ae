"""mycoll as a backend of ray.util.collective. Copy this file into your project:

    import ray_backend

    ray_backend.register()  # in the driver and in each actor
    ray.util.collective.init_collective_group(size, rank, backend="mycoll", group_name="mine")

It supports torch tensors and NumPy arrays, and changes them in place. A process may be in any
number of groups, and needs no torch.distributed.init_process_group. Written for Ray 2.60. The
registry of backends and the key-value store are private parts of Ray, and may differ in other
versions.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import mycoll
import numpy as np
import ray.util
import torch
import torch.distributed as dist
from ray.experimental import internal_kv
from ray.util.collective.backend_registry import _global_registry, register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllGatherOptions,
    AllReduceOptions,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
)
from torch.distributed import DistError, ProcessGroup, TCPStore
from torch.distributed.constants import default_pg_timeout

NAME = "MYCOLL"

_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
}
_POLL_SECONDS = 0.05
_CONNECT_TIME = timedelta(seconds=3)


def register() -> None:
    """Makes the backend known to Ray in this process."""
    if not _global_registry.is_registered(NAME):
        register_collective_backend(NAME, MycollGroup)


class MycollGroup(BaseGroup):
    """A rank of a group. Ray wraps each tensor in a list, with one element for each device."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._group: ProcessGroup | None = _create_group(world_size, rank, group_name)

    @classmethod
    def backend(cls) -> str:
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        try:
            mycoll.Options()  # loads the compiled module
        except ImportError:
            return False
        return True

    def destroy_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    def allreduce(self, tensor: list[Any], allreduce_options: Any = AllReduceOptions) -> None:
        dist.all_reduce(_single(tensor), _OPS[allreduce_options.reduceOp], group=self._group)

    def barrier(self, barrier_options: Any = BarrierOptions) -> None:
        dist.barrier(group=self._group)

    def reduce(self, tensor: list[Any], reduce_options: Any = ReduceOptions) -> None:
        root = reduce_options.root_rank
        mine = _single(tensor)
        if self.rank != root:
            mine = mine.clone()  # torch's reduce may change it
        dist.reduce(mine, op=_OPS[reduce_options.reduceOp], group=self._group, group_dst=root)

    def allgather(
        self,
        tensor_list: list[list[Any]],
        tensor: list[Any],
        allgather_options: Any = AllGatherOptions,
    ) -> None:
        dist.all_gather(_single_list(tensor_list), _single(tensor), group=self._group)

    def broadcast(self, tensor: list[Any], broadcast_options: Any = BroadcastOptions) -> None:
        dist.broadcast(_single(tensor), group=self._group, group_src=broadcast_options.root_rank)

    def reducescatter(
        self,
        tensor: list[Any],
        tensor_list: list[list[Any]],
        reducescatter_options: Any = ReduceScatterOptions,
    ) -> None:
        op = _OPS[reducescatter_options.reduceOp]
        dist.reduce_scatter(_single(tensor), _single_list(tensor_list), op, group=self._group)

    def send(self, tensor: list[Any], send_options: SendOptions) -> None:
        dist.send(_single(tensor), group=self._group, group_dst=send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: RecvOptions) -> None:
        # dist.recv would return the global rank of the sender, which needs a default group.
        work = dist.irecv(_single(tensor), group=self._group, group_src=recv_options.src_rank)
        if work is not None:
            work.wait()


def _create_group(size: int, rank: int, name: str) -> ProcessGroup:
    """Rank 0 starts a store, and keeps its address in Ray's key-value store until all ranks have
    connected.

    The ranks continue only after the address is removed, so that the next group of this name does
    not find it.
    """
    key = f"mycoll group {name}"
    if rank == 0:
        address = ray.util.get_node_ip_address()
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        internal_kv._internal_kv_put(key, f"{address}:{store.port}", overwrite=True)
        try:
            store.wait([f"here/{other}" for other in range(1, size)], default_pg_timeout)
        finally:
            internal_kv._internal_kv_del(key)
        store.set("go", "")
    else:
        store = _connect(key)
        store.set(f"here/{rank}", "")
        store.wait(["go"], default_pg_timeout)
    return mycoll.process_group(store, rank, size, name=name)


def _connect(key: str) -> TCPStore:
    """Connects to the store of rank 0. If an earlier rank 0 was killed, its address may be
    there."""
    deadline = time.monotonic() + default_pg_timeout.total_seconds()
    while True:
        host, _, port = _wait_for(key, deadline).rpartition(":")
        try:
            store = TCPStore(host, int(port), is_master=False, timeout=_CONNECT_TIME)
        except DistError:
            if time.monotonic() > deadline:
                raise
        else:
            store.set_timeout(default_pg_timeout)
            return store


def _wait_for(key: str, deadline: float) -> str:
    while time.monotonic() < deadline:
        value: bytes | None = internal_kv._internal_kv_get(key)
        if value is not None:
            return value.decode()
        time.sleep(_POLL_SECONDS)
    raise TimeoutError(
        f"timed out after {default_pg_timeout} waiting for rank 0 of the {key}: has it called "
        "init_collective_group?"
    )


def _single(tensors: list[Any]) -> torch.Tensor:
    [tensor] = tensors
    if isinstance(tensor, np.ndarray):
        return torch.from_numpy(tensor)
    if isinstance(tensor, torch.Tensor):
        return tensor
    raise TypeError(f"expected a torch.Tensor or a numpy.ndarray, got a {type(tensor).__name__}")


def _single_list(lists: list[list[Any]]) -> list[torch.Tensor]:
    [tensors] = lists
    return [_single([tensor]) for tensor in tensors]
