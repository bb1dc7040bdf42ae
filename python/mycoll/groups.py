"""Groups without torch.distributed's global state, and windows: memory of each rank that the others
write to, and read where they can. See docs/guide.md."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import Backend
from torch.distributed import HashStore, PrefixStore, ProcessGroup, Store
from torch.distributed.constants import default_pg_timeout

from mycoll import _create, _groups

if TYPE_CHECKING:
    from mycoll._C import Options, Window


def process_group(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout: timedelta | None = None,
    name: str = "group",
    pg_options: Options | None = None,
    enable_reconfigure: bool = False,
) -> ProcessGroup:
    """Makes a group of ranks that meet in a store. Returns when all of them have joined.

    It needs no init_process_group, and torch.distributed does not list it. A process may have any
    number of such groups, be several ranks of one group (in threads), and make and drop groups in
    any order, from any thread. `shutdown()` leaves the group, `abort()` ends it for all ranks.
    Dropping the last reference leaves the group, too.

    Args:
        store: Where the ranks find each other: any `Store`. One written in Python needs `set`,
            `get` and `check`.
        rank: This rank in the group, from 0 on.
        size: The number of ranks.
        timeout: For making the group and for each operation; by default that of `pg_options`, or
            30 minutes.
        name: The same on all ranks; used in messages and in the store. Groups that share a store
            need different names.
        pg_options: As for init_process_group.
        enable_reconfigure: As for init_process_group of torch 2.14 and later.

    Returns:
        The group, for the methods of `ProcessGroup`, or for torch.distributed's functions with
        `group_src` and `group_dst`.

    Raises:
        ArgumentError: The ranks were given different arguments.
        torch.distributed.DistBackendError: A rank has ended, or did not come in time.

    Example:
        store = dist.PrefixStore("pairs", dist.distributed_c10d._get_default_store())
        group = mycoll.process_group(store, dist.get_rank(), dist.get_world_size())
        group.allreduce([torch.ones(4)]).wait()
        group.shutdown()
    """
    if enable_reconfigure and not hasattr(ProcessGroup, "reconfigure"):
        raise RuntimeError(
            f"torch {torch.__version__} has no reconfigure, 2.14 does; use mycoll.Endpoint"
        )
    if timeout is None:
        timeout = default_pg_timeout if pg_options is None else pg_options.timeout
    module = _create.prepare()
    own_store = PrefixStore(f"mycoll {name}/", store)
    backend = module.MycollBackend(
        own_store,
        rank,
        size,
        timeout,
        name,
        [],
        pg_options,
        _create.has_device(),
        of_job=False,
        enable_reconfigure=enable_reconfigure,
    )
    return _group_of(backend, own_store, name)


class Endpoint:
    """This process, as a member of groups that are made of handles, without a store.

    Each process makes an endpoint and passes its `handle` to the others, by any means: a queue, a
    file, a scheduler, a message in the group that they have now. Those that shall be in the next
    group call `form()` with the same handles. Ranks may end, and others may come: no rank and no
    store is needed in every group. Under torch 2.14 and later, `enable_reconfigure=True` does the
    same to torch's own groups.

    Args:
        name: The same on all ranks; it appears in messages.
        timeout: The longest time of an operation of its groups, unless form() is given options.
        store: Nothing is stored in it. As in init_process_group, its host decides which network
            interface is used; without it, MYCOLL_SOCKET_IFNAME or the first interface.

    Example:
        endpoint = mycoll.Endpoint()
        handles = [""] * dist.get_world_size()
        dist.all_gather_object(handles, endpoint.handle)
        group = endpoint.form(uuid=1, handles=handles)
        group.allreduce([torch.ones(4)]).wait()
    """

    def __init__(
        self,
        *,
        name: str = "elastic",
        timeout: timedelta = default_pg_timeout,
        store: Store | None = None,
    ) -> None:
        self._timeout = timeout
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        self._native = _create.prepare()._Endpoint(name, timeout, getattr(store, "host", ""))

    @property
    def handle(self) -> str:
        """The text that others need to reach this process, the same for all groups. It is a secret:
        a process that has the handles of a group can read its data, unless MYCOLL_SECRET_FILE is
        set."""
        return self._native.handle  # type: ignore[no-any-return]

    def form(
        self,
        uuid: int,
        handles: Sequence[str],
        *,
        timeout: timedelta | None = None,
        pg_options: Options | None = None,
    ) -> ProcessGroup:
        """Makes a group of the processes with these handles, by rank. Returns when all of them have
        called it.

        Earlier groups are not touched: call `abort()` or `shutdown()` on what is no longer needed.
        If it fails, no rank has the group; call it again with another uuid.

        Args:
            uuid: The same on all ranks, and another one for each call.
            handles: The same on all ranks, in the same order; this process's own is among them.
            timeout: The longest wait for the others.
            pg_options: As for init_process_group.

        Returns:
            The group.

        Raises:
            mycoll.ArgumentError: The uuid was used before, or the handles are not those of the
                other ranks.
            torch.distributed.DistBackendError: A rank has ended, or did not come in time.
            torch.distributed.DistNetworkError: A rank cannot be reached.
        """
        module = _create.prepare()
        if pg_options is None:
            pg_options = module.Options(timeout=self._timeout)
        timeout = pg_options.timeout if timeout is None else timeout
        backend = self._native.form(uuid, list(handles), timeout, pg_options, _create.has_device())
        return _group_of(backend, HashStore(), backend._name)


def new_window(tensor: torch.Tensor | None = None, group: ProcessGroup | None = None) -> Window:
    """Makes a window. All ranks of the group call it together: each with a tensor of its own, or
    all without one.

    Under torch 2.14 and later `torch.distributed.distributed_c10d._new_window` returns the same.

    Args:
        tensor: The memory that the others write to. The other ranks of the host map tensors of
            `mycoll.empty()` and the like; others are written by messages. `None`:
            `Window.tensor_register()` opens the window later.
        group: The group; `None`: the world. Ranks in the calls of the window are its ranks.

    Returns:
        The window.

    Raises:
        ValueError: Another backend than mycoll serves the group's CPU tensors.

    Example:
        window = mycoll.new_window(mycoll.zeros(4))
        neighbour = (dist.get_rank() + 1) % dist.get_world_size()
        window.put(torch.ones(4), neighbour, 0, async_op=False)
        window.tensor_deregister()
    """
    return _groups.own_backend(group).new_window(tensor)  # type: ignore[no-any-return]


def _group_of(backend: Backend, store: Store, name: str) -> ProcessGroup:
    group = ProcessGroup(store, backend.rank(), backend.size())
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, backend)
    group._set_group_name(name)  # type: ignore[arg-type]
    return group
