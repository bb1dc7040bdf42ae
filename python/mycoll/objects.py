"""torch's collectives of objects, for groups whose CPU tensors mycoll serves.

torch sends the sizes, then the pickles, each padded to the longest. Here the first message has a
fixed size, and most objects are in it. The rest of longer pickles follows, and large memory, which
is received where it stays (parcel.py). The receivers know the sizes that decide what is sent, so
all ranks agree.

For other groups, for devices and for `weights_only`, torch's functions are called with the same
arguments.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from mycoll._groups import backend_of, members, once, replace
from mycoll.parcel import (
    CELL_BYTES,
    Incoming,
    Parcel,
    as_tensor,
    head_bytes,
    new_memory,
    objects_inside,
    pack,
)

# The first message has CELL_BYTES from each rank, and less in large groups: so much of all ranks.
_ALL_CELLS_BYTES = 1 << 18
_SMALLEST_CELL = 512

# The tag of messages in gather_object and scatter_object_list; those of programs have 0, or
# small numbers.
_TAG = 0x6F626A73


class _NotOurs(Exception):
    """The objects of a call do not travel by mycoll."""


@once
def install() -> None:
    """Wraps the functions, once in a process."""
    for ours in (
        _all_gather_object,
        _gather_object,
        _broadcast_object_list,
        _scatter_object_list,
        _send_object_list,
        _recv_object_list,
    ):
        replace(ours.__name__[1:], functools.partial(_wrap, ours))


def _wrap(ours: Callable[..., Any], torchs: Callable[..., Any]) -> Callable[..., Any]:
    known = inspect.signature(ours).parameters

    def wrapped(*args: Any, **more: Any) -> Any:
        # An option that is set, such as weights_only, is torch's.
        if not any((*args[len(known) :], *(more[name] for name in more if name not in known))):
            with contextlib.suppress(_NotOurs):
                given = {name: more[name] for name in more if name in known}
                return ours(*args[: len(known)], **given)
        return torchs(*args, **more)

    return wrapped


# --- the functions, with torch's arguments --------------------------------------------------------


def _all_gather_object(object_list: list[Any], obj: Any, group: ProcessGroup | None = None) -> None:
    backend = _backend(group)
    for i, gathered in enumerate(_all_gather(backend, pack([obj]))):
        object_list[i] = gathered


def _gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
) -> None:
    backend = _backend(group)
    root = _group_rank(group, dst, group_dst, default=0)
    distributed_c10d._validate_output_list_for_rank(backend.rank(), root, object_gather_list)
    for i, parcel in enumerate(_gather(backend, pack([obj]), root)):
        assert object_gather_list is not None
        object_gather_list[i] = parcel.objects()[0]


def _broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
) -> None:
    backend = _backend(group, device)
    root = _group_rank(group, src, group_src, default=0)
    _check_not_empty(object_list)
    if backend.rank() == root:
        _broadcast(backend, pack(object_list), root)
    else:
        _put(object_list, _broadcast(backend, None, root), root)


def _scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
) -> None:
    backend = _backend(group)
    root = _group_rank(group, src, group_src, default=0)
    outputs, inputs = scatter_object_output_list, scatter_object_input_list
    if not isinstance(outputs, list) or not outputs:
        raise ValueError(
            "Expected argument scatter_object_output_list to be a list of size at least 1."
        )
    parcels = None
    if backend.rank() == root:
        if inputs is None:
            raise ValueError("source rank must provide non-None scatter_object_input_list")
        if len(inputs) != backend.size():
            raise ValueError(
                f"scatter_object_input_list has {len(inputs)} objects, and the group has "
                f"{backend.size()} ranks: give one for each"
            )
        parcels = [pack([item]) for item in inputs]
    outputs[0] = _scatter(backend, parcels, root).objects()[0]


def _send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    backend = _backend(group, device)
    peer = _group_rank(group, dst, group_dst)
    distributed_c10d._check_not_self_rank(members(group), peer, "destination")
    _check_not_empty(object_list)
    parcel = pack(object_list)
    cell = backend.send([as_tensor(parcel.memory[:CELL_BYTES])], peer, 0)
    _wait([cell, *_send_rest(backend, parcel, CELL_BYTES, peer, 0)])


def _recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> Any:
    backend = _backend(group, device)
    peer = _group_rank(group, src, group_src)
    distributed_c10d._check_not_self_rank(members(group), peer, "source")
    _check_not_empty(object_list)
    cell = new_memory(CELL_BYTES)
    _wait([backend.recv([as_tensor(cell)], peer, 0)])
    [parcel] = _receive_rest(backend, [(peer, cell)], 0)
    _put(object_list, parcel, peer)
    whole = members(group)
    is_listed = whole in distributed_c10d._world.pg_group_ranks
    return dist.get_global_rank(whole, peer) if is_listed else peer


# --- groups and arguments -------------------------------------------------------------------------


def _backend(group: Any, device: Any = None) -> Any:
    """mycoll's, by which the objects travel; the same answer on all ranks of a group.

    Raises:
        _NotOurs: The program has a pickler of its own, or they travel by a device, or another
            backend.
    """
    is_ours = (distributed_c10d._pickler, distributed_c10d._unpickler) == _PICKLERS
    on_device = device is not None and torch.device(device).type != "cpu"
    if on_device or not is_ours or distributed_c10d._rank_not_in_group(group):
        raise _NotOurs
    try:
        backend = backend_of(group)
    except (RuntimeError, AttributeError):  # serves devices only; no ProcessGroup, as torch's RPC
        backend = None
    if backend is None:
        raise _NotOurs
    return backend


_PICKLERS = (pickle.Pickler, pickle.Unpickler)


def _group_rank(
    group: ProcessGroup | None, rank: int | None, group_rank: int | None, default: int | None = None
) -> int:
    if rank is None and group_rank is None:
        rank = default
    result: int = distributed_c10d._canonicalize_group_rank(
        members(group), rank, group_rank, return_global=False
    )
    return result


def _check_not_empty(object_list: Sequence[Any]) -> None:
    if len(object_list) == 0:
        raise ValueError("object_list is empty: it needs a place for each object")


def _put(object_list: list[Any], parcel: Incoming, source: int) -> None:
    objects = parcel.objects()
    if len(objects) != len(object_list):
        raise ValueError(
            f"rank {source} sent {len(objects)} objects, and this rank's object_list has "
            f"{len(object_list)} places: give lists of one length on all ranks"
        )
    for i, each in enumerate(objects):  # as torch does: any sequence that can be assigned to
        object_list[i] = each


# --- what goes over the wire ----------------------------------------------------------------------


def _all_gather(backend: Any, parcel: Parcel) -> list[Any]:
    size, rank = backend.size(), backend.rank()
    room = _room(size)
    cells = new_memory(size * room)
    options = _now(distributed_c10d.AllgatherOptions)
    _wait([backend._allgather_base(as_tensor(cells), as_tensor(parcel.memory[:room]), options)])
    heads = [cells[start : start + room] for start in range(0, size * room, room)]
    objects = objects_inside(heads)
    if objects is not None:
        return objects
    if any(head_bytes(head) > room for head in heads):
        nothing = new_memory(0)
        heads = [_memory_for(head) for head in heads]
        outputs = [as_tensor(nothing if len(head) == room else head) for head in heads]
        own = parcel.head()
        rest = as_tensor(nothing if len(own) <= room else own)
        _wait([backend.allgather([outputs], [rest], options)])
    parcels = [Incoming(head) for head in heads]
    works = []
    for root, incoming in enumerate(parcels):
        works += _broadcast_asides(backend, parcel if root == rank else incoming, root)
    _wait(works)
    if parcel.asides:
        parcels[rank] = parcel.copy()
    return [incoming.objects()[0] for incoming in parcels]


def _gather(backend: Any, parcel: Parcel, root: int) -> list[Incoming]:
    """On the root, what all ranks have sent; on the others, nothing."""
    size, rank = backend.size(), backend.rank()
    room = _room(size)
    options = _now(distributed_c10d.GatherOptions, root)
    cell = as_tensor(parcel.memory[:room])
    if rank != root:
        _wait([backend.gather([], [cell], options)])
        _wait(_send_rest(backend, parcel, room, root, _TAG))
        return []
    cells = [new_memory(room) for _ in range(size)]
    _wait([backend.gather([[as_tensor(place) for place in cells]], [cell], options)])
    others = [(peer, cells[peer]) for peer in range(size) if peer != root]
    parcels = _receive_rest(backend, others, _TAG)
    parcels.insert(root, parcel.copy())
    return parcels


def _broadcast(backend: Any, parcel: Parcel | None, root: int) -> Any:
    """The parcel is the root's; the others get what it has sent."""
    options = _now(distributed_c10d.BroadcastOptions, root)
    head = new_memory(CELL_BYTES) if parcel is None else parcel.memory[:CELL_BYTES]
    _wait([backend.broadcast([as_tensor(head)], options)])
    if head_bytes(head) > CELL_BYTES:
        head = _memory_for(head) if parcel is None else parcel.head()
        _wait([backend.broadcast([as_tensor(head)], options)])
    if parcel is None:
        parcel = Incoming(head)
    _wait(_broadcast_asides(backend, parcel, root))
    return parcel


def _scatter(backend: Any, parcels: Sequence[Parcel] | None, root: int) -> Incoming:
    """The parcels are the root's, one for each rank."""
    room = _room(backend.size())
    options = _now(distributed_c10d.ScatterOptions, root)
    cell = new_memory(room)
    if parcels is None:
        _wait([backend.scatter([as_tensor(cell)], [], options)])
        [incoming] = _receive_rest(backend, [(root, cell)], _TAG)
        return incoming
    cells = [as_tensor(parcel.memory[:room]) for parcel in parcels]
    _wait([backend.scatter([as_tensor(cell)], [cells], options)])
    works = []
    for peer, parcel in enumerate(parcels):
        if peer != root:
            works += _send_rest(backend, parcel, room, peer, _TAG)
    incoming = parcels[root].copy()
    _wait(works)
    return incoming


def _broadcast_asides(backend: Any, parcel: Parcel, root: int) -> list[Any]:
    if not parcel.asides:
        return []
    options = _now(distributed_c10d.BroadcastOptions, root)
    options.asyncOp = len(parcel.asides) > 1
    return [backend.broadcast([aside], options) for aside in parcel.asides]


def _send_rest(backend: Any, parcel: Parcel, room: int, peer: int, tag: int) -> list[Any]:
    """Sends the rest of a parcel after the first message, which had `room` bytes."""
    head = parcel.head()
    rest = [as_tensor(head)] if len(head) > room else []
    rest += parcel.asides
    return [backend.send([tensor], peer, tag) for tensor in rest]


def _receive_rest(
    backend: Any, cells: Sequence[tuple[int, memoryview]], tag: int
) -> list[Incoming]:
    """From each of these ranks, what it did not send in its first message."""
    heads = [_memory_for(cell) for _, cell in cells]
    works = []
    for (peer, cell), head in zip(cells, heads, strict=True):
        if head is not cell:
            works.append(backend.recv([as_tensor(head)], peer, tag))
    _wait(works)
    parcels = [Incoming(head) for head in heads]
    works = []
    for (peer, _), parcel in zip(cells, parcels, strict=True):
        works += [backend.recv([aside], peer, tag) for aside in parcel.asides]
    _wait(works)
    return parcels


def _now(kind: Any, root: int | None = None) -> Any:
    """Options of a call that is over when it returns: no other thread is woken for it."""
    options = kind()
    options.asyncOp = False
    if root is not None:
        options.rootRank = root
    return options


def _memory_for(cell: memoryview) -> memoryview:
    """The cell, if the head is in it; or memory for the head."""
    size = head_bytes(cell)
    return cell if size <= len(cell) else new_memory(size)


def _room(size: int) -> int:
    """Of each rank in the first message, in a group of this size."""
    return min(CELL_BYTES, max(_SMALLEST_CELL, _ALL_CELLS_BYTES // size))


def _wait(works: Iterable[Any]) -> None:
    for work in works:
        if work is not None:  # done
            work.wait()
