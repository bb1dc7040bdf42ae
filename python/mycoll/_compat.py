"""Wraps torch functions that depend on a backend's name, so that they work for mycoll's groups.

docs/compatibility.md lists them, and what torch's own do. The first mycoll group of a process wraps
them; a process that makes none keeps torch's own. For groups without mycoll, torch's function is
called with the same arguments. The collectives of objects are in objects.py.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed import ProcessGroup, c10d_logger, distributed_c10d

from mycoll._groups import backend_of, members, once, replace, unwrapped
from mycoll._native import native

_NCCL_UNDEFINED = -(2**31)  # in a ProcessGroupNCCL.NCCLConfig: NCCL chooses

# By parent: how often it has been split, by the name that its ranks have in common: after
# reconfigure() they have another one. They count alike, as all of them split it.
_splits: weakref.WeakKeyDictionary[ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


@once
def install() -> None:
    """Wraps the functions, once in a process."""
    # Since 2.15 torch records the calls of backends that keep no record of their own: from outside,
    # for 2 us a call, and 15 for a barrier. mycoll keeps one.
    recording: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add("mycoll")
    replace("monitored_barrier", _wrap_monitored_barrier)
    if not hasattr(distributed_c10d, "set_timeout"):  # which serves every backend
        replace("_set_pg_timeout", _wrap_set_pg_timeout)
    replace("split_group", _wrap_split_group)
    replace("shrink_group", _wrap_shrink_group)
    replace("_get_split_source", _wrap_get_split_source)


def _backend_names(group: ProcessGroup | None) -> dict[str, str]:
    """{"cpu": "mycoll", "cuda": "nccl"}; empty when this process is not in the group."""
    if distributed_c10d._rank_not_in_group(group):
        return {}
    if group is not None and group not in distributed_c10d._world.pg_map:  # mycoll.process_group's
        return {each.type: group._get_backend(each).name() for each in group._device_types}
    config = dist.get_backend_config(group)
    return dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)


def _own_backends(group: ProcessGroup) -> list[Any]:
    """mycoll's backends of the group, also under another one's name."""
    found = (backend_of(group, each) for each in group._device_types)
    return [backend for backend in found if backend is not None]


def _wrap_monitored_barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    def monitored_barrier(
        group: ProcessGroup | None = None,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        if _backend_names(group).get("cpu") != "mycoll":
            original(group, timeout, wait_all_ranks)
            return
        if timeout is None:
            timeout = distributed_c10d._get_default_timeout(distributed_c10d.Backend("mycoll"))
        elif isinstance(timeout, (int, float)):
            timeout = timedelta(seconds=timeout)  # as torch, which warns and takes seconds
        distributed_c10d._check_valid_timeout(timeout)
        barrier = members(group).monitored_barrier  # type: ignore[attr-defined]
        barrier(timeout, wait_all_ranks=wait_all_ranks)

    return monitored_barrier


def _wrap_set_pg_timeout(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_pg_timeout(timeout: timedelta, group: ProcessGroup | None = None) -> None:
        names = _backend_names(group)
        ours = [device for device, name in names.items() if name == "mycoll"]
        if len(ours) < len(names) or not ours:
            original(timeout, group)
        for device in ours:
            backend = members(group)._get_backend(torch.device(device))
            unwrapped(backend)._set_default_timeout(timeout)

    return set_pg_timeout


def _wrap_split_group(original: Callable[..., Any]) -> Callable[..., Any]:
    def split_group(
        parent_pg: ProcessGroup | None = None,
        split_ranks: list[list[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any | None = None,
        group_desc: str | None = None,
        **more: Any,
    ) -> ProcessGroup | int | None:
        default = members(None)
        parent = members(parent_pg)
        on_cpu = _backend_names(parent).get("cpu") == "mycoll" and default.bound_device_id is None
        if not on_cpu or not split_ranks:
            ours = _device_backend(parent) if more.get("backend") is None else None
            if ours is not None:
                pg_options = own_options(pg_options)
            args = (parent_pg, split_ranks, timeout, pg_options, group_desc)
            make = functools.partial(original, *args, **more)
            return make() if ours is None else _split_devices(ours, make)
        backend = _part_of_backends(parent, more.get("backend"))
        mine = _part_of(parent.rank(), parent.size(), split_ranks)
        ours = unwrapped(parent._get_backend(torch.device("cpu")))
        name = getattr(ours, "_name", parent.group_name)
        counts = _splits.setdefault(parent, Counter())
        counts[name] += 1
        if mine is None:
            # As torch: -100 since 2.15, whose annotations have a name for it.
            outside = dist.GroupMember.NON_GROUP_MEMBER
            return outside if hasattr(distributed_c10d, "_NonGroupMember") else None
        # As new_group, but only these ranks take part. They meet in the store by the group's name,
        # for which torch would count the groups of the process, and those differ.
        name = f"{name}:split{counts[name] - 1}:{mine[0]}"
        ranks = [dist.get_global_rank(parent, rank) for rank in mine]
        kind, world = distributed_c10d.Backend(backend), distributed_c10d._world
        made: ProcessGroup
        made, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            mine.index(parent.rank()),
            ranks,
            kind,
            world.pg_map[default][1],
            distributed_c10d.GroupName(name),
            backend_options=pg_options,
            timeout=timeout or distributed_c10d._get_default_timeout(kind),
            group_desc=group_desc,
        )
        world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
        return made

    return split_group


def _part_of_backends(parent: ProcessGroup, wanted: str | None) -> str:
    """split_group's `backend`: the parent's, or those of them that serve some of its devices."""
    names = _backend_names(parent)
    whole: str = dist.get_backend(parent)
    if wanted is None:
        return whole
    wanted = str(wanted).lower()
    if ":" in wanted:
        entries = (entry.partition(":") for entry in wanted.split(","))
        part = {device: name for device, _, name in entries}
    else:  # as in torch: all devices that it serves in the parent
        part = {device: name for device, name in names.items() if name == wanted}
    if not part or any(names.get(device) != name for device, name in part.items()):
        raise ValueError(f"backend: {wanted} is no part of the parent's backends, {names}")
    return whole if part == names else ",".join(f"{d}:{name}" for d, name in part.items())


def _device_backend(group: ProcessGroup) -> Any | None:
    """mycoll's, where the job is bound to devices; the same answer on all ranks of the group."""
    bound = members(None).bound_device_id
    if bound is None or _backend_names(group).get(bound.type) != "mycoll":
        return None
    backend = unwrapped(group._get_backend(bound))
    return backend if hasattr(backend, "_split_devices") else None


def _split_devices(parent: Any, make: Callable[[], ProcessGroup | None]) -> ProcessGroup | None:
    """Makes the group, and splits NCCL's communicator, once for all of these groups. As torch
    demands of split_group, all ranks of the parent are here, in a new group or not."""
    made = None
    try:
        made = make()
    except BaseException:
        with contextlib.suppress(Exception):
            parent._split_devices(None, willing=False)  # the others continue
        raise
    child = _device_backend(made) if isinstance(made, ProcessGroup) else None
    parent._split_devices(child, willing=True)
    return made


def own_options(options: Any) -> Any:
    """Returns mycoll's options as they are, and torch's for nccl as mycoll's with their settings.

    None for options of other backends: a group like "cpu:mycoll,cuda:xccl" passes its options to
    both of its backends. The timeout in them is not used, as torch passes that of the group, too.
    """
    if not isinstance(options, Backend.Options) or isinstance(options, native().Options):
        return options
    config = getattr(options, "config", None)
    if config is None or options.backend != "nccl":
        return None
    ours = native().Options()
    for name in dir(ours.nccl):
        theirs = getattr(config, "blocking" if name == "is_blocking" else name, None)
        is_set = theirs is not None and theirs != _NCCL_UNDEFINED
        if name.startswith("_") or not is_set:
            continue
        setattr(ours.nccl, name, bool(theirs) if name == "is_blocking" else theirs)
    return ours


def _wrap_get_split_source(original: Callable[..., Any]) -> Callable[..., Any]:
    """Up to 2.13, torch passes a world that can be split to the backend of each new group, and nccl
    accepts only nccl's. mycoll's backends do not need it."""

    def get_split_source(*args: Any, **more: Any) -> Any:
        source = original(*args, **more)
        module = sys.modules.get("mycoll._C")  # absent: there is no group of ours
        return None if module is not None and isinstance(source, module.MycollBackend) else source

    return get_split_source


@once
def guard_errors() -> None:
    """Wraps what loses errors, once in a process; for all groups that mycoll makes."""
    replace("_coalescing_manager", _wrap_coalescing_manager)
    replace("_get_msg_dict", _wrap_get_msg_dict, c10d_logger)


def _wrap_get_msg_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_msg_dict(name: str, *args: Any, **more: Any) -> Any:
        # torch logs an error with its group; what this raises takes the place of the error.
        with contextlib.suppress(ValueError):
            return original(name, *args, **more)
        return {"func_name": name}

    return get_msg_dict


class _OwnBlocks(threading.local):
    def __init__(self) -> None:
        self.blocks: dict[ProcessGroup, Any] = {}


class _Blocks(MutableMapping[ProcessGroup, Any]):
    """In the place of torch's dict of the open blocks, by group. Only the thread that has opened a
    block of a group of mycoll sees it: callbacks run on other threads, and torch would record their
    collectives, as if they were part of the block."""

    def __init__(self, others: dict[ProcessGroup, Any]) -> None:
        self.own = _OwnBlocks()
        self.others = others

    def _place_of(self, group: ProcessGroup) -> dict[ProcessGroup, Any]:
        return self.own.blocks if group in self.own.blocks else self.others

    def __getitem__(self, group: ProcessGroup) -> Any:
        return self._place_of(group)[group]

    def __setitem__(self, group: ProcessGroup, operations: Any) -> None:
        self._place_of(group)[group] = operations

    def __delitem__(self, group: ProcessGroup) -> None:
        del self._place_of(group)[group]

    def __contains__(self, group: object) -> bool:  # each collective asks: without an exception
        return group in self.own.blocks or group in self.others

    def __iter__(self) -> Iterator[ProcessGroup]:
        return iter([*self.own.blocks, *self.others])

    def __len__(self) -> int:
        return len(self.own.blocks) + len(self.others)


@once  # not before the first block: each collective looks there
def _keep_blocks_by_thread() -> None:
    world: Any = distributed_c10d._world
    world._pg_coalesce_state = _Blocks(world._pg_coalesce_state)


@contextlib.contextmanager
def _block(group: ProcessGroup, torchs: Any) -> Iterator[Any]:
    """torch's block of operations, which has no `finally`. After an exception the group would still
    be coalescing: its next collectives would only be recorded, and return without a result."""
    _keep_blocks_by_thread()
    state: Any = distributed_c10d._world.pg_coalesce_state
    blocks = state.own.blocks
    if group in blocks:
        # torch's manager would add to that block, and end it in the wrong place.
        raise native().ArgumentError(
            f"mycoll group '{group.group_name}': _coalescing_manager: a block of this group is "
            "open already, and blocks cannot be nested"
        )
    blocks[group] = []
    try:
        with torchs as manager:
            yield manager
    except BaseException:
        blocks.pop(group, None)
        for backend in _own_backends(group):
            backend._drop_coalescing()
        raise


def _wrap_coalescing_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    ours: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()

    def coalescing_manager(
        group: ProcessGroup | None = None,
        device: torch.device | None = None,
        async_ops: bool = False,
    ) -> Any:
        whole = group or members(None)
        block = original(whole, device, async_ops)
        if distributed_c10d._rank_not_in_group(whole):
            return block
        if whole not in ours:
            if not _own_backends(whole):
                return block
            ours.add(whole)
        return _block(whole, block)

    return coalescing_manager


def _part_of(rank: int, size: int, split_ranks: list[list[int]]) -> list[int] | None:
    """The part that holds `rank`, checked and sorted as in torch."""
    for part in split_ranks:
        if not part or len(set(part)) != len(part):
            raise ValueError(f"split_ranks: {part} is empty or names a rank twice")
        if min(part) < 0 or max(part) >= size:
            raise ValueError(f"split_ranks: {part} names a rank outside 0 to {size - 1}")
    return next((sorted(part) for part in split_ranks if rank in part), None)


def _wrap_shrink_group(original: Callable[..., Any]) -> Callable[..., Any]:
    def shrink_group(
        ranks_to_exclude: list[int], group: ProcessGroup | None = None, *args: Any, **more: Any
    ) -> ProcessGroup:
        names = _backend_names(group)
        made = original(ranks_to_exclude, group, *args, **more)
        for name in (each for each in names if names[each] == "mycoll"):
            device, backends = torch.device(name), _own_backends(made)
            if backends and device not in made._device_types:
                made._register_backend(device, ProcessGroup.BackendType.CUSTOM, backends[0])
        return made  # type: ignore[no-any-return]

    return shrink_group
