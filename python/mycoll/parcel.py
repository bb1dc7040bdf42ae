"""Python objects as bytes, and the large memory inside them without a copy.

A parcel has a head and asides. The head is one run of bytes:

    numbers of objects and asides, bytes of the head    16 bytes
    end of each object's pickle, as an offset            8 bytes each
    the pickles
    size of each aside, twice; + 1 for a storage         8 bytes each

An aside is memory of a tensor or an array that is sent by itself and received where it stays.
Objects are pickled as torch pickles them, each by itself, but for the memory of storages on the
CPU; so torch's code handles views, subclasses, sparse tensors and parameters.
"""

from __future__ import annotations

import copyreg
import ctypes
import gc
import io
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Memory of this size travels by itself: one more message costs less than two copies.
ASIDE_BYTES = 1 << 17

# A head is in memory of at least this size.
CELL_BYTES = 4096

_FRONT = struct.Struct("<IIQ")
_ONE = struct.Struct(f"{_FRONT.format}Q")  # of one object, as most parcels are
_PROTOCOL = 5

# A longer head has memory that is not filled first, and is unpickled without the garbage collector.
_PAUSE_BYTES = 1 << 16


class Parcel:
    """Objects that a rank sends, or has received."""

    def __init__(self, memory: memoryview, asides: Sequence[torch.Tensor]) -> None:
        # Begins with the head, which may be longer than the part of it that others get first.
        self.memory = memory
        self.asides = asides  # as bytes

    def head(self) -> memoryview:
        """The head, and nothing behind it."""
        return self.memory[: head_bytes(self.memory)]

    def copy(self) -> Incoming:
        """One whose objects share no memory with those that were packed."""
        own = Incoming(self.memory)
        for tensor, aside in zip(own.asides, self.asides, strict=True):
            tensor.copy_(aside)
        return own


class Incoming(Parcel):
    """A parcel whose head is here, and that has memory for the asides, for others to fill."""

    def __init__(self, memory: memoryview) -> None:
        self._count, asides, total = _FRONT.unpack_from(memory)
        self._buffers: list[Any] = []
        tensors: list[torch.Tensor] = []
        entries = struct.unpack_from(f"<{asides}Q", memory, total - 8 * asides) if asides else ()
        for entry in entries:
            size, is_storage = divmod(entry, 2)
            storage = torch.UntypedStorage(size)
            tensor = bytes_of_storage(storage)
            tensors.append(tensor)
            self._buffers.append(storage if is_storage else tensor.numpy().data)
        super().__init__(memory, tensors)

    def objects(self) -> list[Any]:
        """Unpickles the objects, after the asides were received. They become the memory of the
        objects: call it once."""
        ends = struct.unpack_from(f"<{self._count}Q", self.memory, _FRONT.size)
        start = _FRONT.size + 8 * self._count
        buffers = iter(self._buffers)
        result = []
        # All objects of a long head are kept. The garbage collector would visit them repeatedly,
        # which takes most of the time.
        pauses = head_bytes(self.memory) >= _PAUSE_BYTES and gc.isenabled()
        if pauses:
            gc.disable()
        try:
            for end in ends:
                result.append(pickle.loads(self.memory[start:end], buffers=buffers))
                start = end
        finally:
            if pauses:
                gc.enable()
        return result


def pack(objects: Sequence[Any]) -> Parcel:
    """Pickles objects into a parcel; large memory stays where it is."""
    return _Packing().pack(objects)


def head_bytes(cell: memoryview) -> int:
    """How long the head is that begins like this."""
    total: int = _FRONT.unpack_from(cell)[2]
    return total


def objects_inside(cells: Sequence[memoryview]) -> list[Any] | None:
    """The objects of parcels of one object each, if every cell holds its parcel entirely."""
    ends = []
    for cell in cells:
        _, asides, total, end = _ONE.unpack_from(cell)
        if asides or total > len(cell):
            return None
        ends.append(end)
    return [pickle.loads(cell[_ONE.size : end]) for cell, end in zip(cells, ends, strict=True)]


def new_memory(size: int) -> memoryview:
    """Memory of so many bytes, which may hold anything."""
    if size < _PAUSE_BYTES:
        return memoryview(bytearray(size))
    return bytes_of_storage(torch.UntypedStorage(size)).numpy().data  # not filled with zeros


def as_tensor(memory: memoryview) -> torch.Tensor:
    """The same memory as a tensor of bytes."""
    if memory.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8)


def bytes_of_storage(storage: torch.UntypedStorage) -> torch.Tensor:
    """The memory of a storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


class _Packing:
    """One call of pack()."""

    def __init__(self) -> None:
        self._asides: list[torch.Tensor] = []
        self._entries: list[int] = []
        # Placeholders for the memory of storages in the pickle, until the pickler asks about them.
        self._storages: dict[int, tuple[pickle.PickleBuffer, torch.UntypedStorage]] = {}

    def pack(self, objects: Sequence[Any]) -> Parcel:
        file = io.BytesIO()
        file.write(bytes(_FRONT.size + 8 * len(objects)))
        table = self._reducers()
        ends = []
        for item in objects:
            pickler = pickle.Pickler(file, _PROTOCOL, buffer_callback=self._stays_inside)
            pickler.dispatch_table = table
            pickler.dump(item)
            ends.append(file.tell())
        entries = self._entries
        if entries:
            file.write(struct.pack(f"<{len(entries)}Q", *entries))
        total = file.tell()
        memory: memoryview | bytearray
        if total < CELL_BYTES:
            memory = bytearray(CELL_BYTES)
            memory[:total] = file.getvalue()
        else:
            memory = file.getbuffer()
        front = _ONE if len(ends) == 1 else struct.Struct(f"{_FRONT.format}{len(ends)}Q")
        front.pack_into(memory, 0, len(ends), len(entries), total, *ends)
        return Parcel(memoryview(memory), self._asides)

    def _reducers(self) -> dict[type, Callable[[Any], Any]]:
        # Not a Pickler's reducer_override, which would be called for each object.
        table: dict[type, Callable[[Any], Any]] = dict(copyreg.dispatch_table)
        table[torch.TypedStorage] = table[torch.UntypedStorage] = self._reduce_storage
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            table[numpy.ndarray] = _reduce_array
        return table

    def _reduce_storage(self, given: Any) -> Any:
        if isinstance(given, torch.TypedStorage):
            storage, dtype = given._untyped_storage, given.dtype
        else:
            # Bytes with a type are what torch.load makes of it, and torch's float8 tensors want.
            storage, dtype = given, torch.uint8
        if type(storage) is not torch.UntypedStorage or storage.device.type != "cpu":
            return given.__reduce__()
        size = storage.nbytes()
        if size < ASIDE_BYTES:
            memory = ctypes.string_at(storage.data_ptr(), size) if size else b""
            return _typed_storage, (memory, dtype)
        stand_in = pickle.PickleBuffer(bytearray())
        self._storages[id(stand_in)] = stand_in, storage
        return _typed_storage, (stand_in, dtype)

    def _stays_inside(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer that an object offers to the pickler is copied into the pickle."""
        _, storage = self._storages.pop(id(buffer), (None, None))
        if storage is not None:
            tensor = bytes_of_storage(storage)
        else:
            try:
                view = buffer.raw()
            except BufferError:  # not contiguous
                return True
            if view.nbytes < ASIDE_BYTES or view.readonly:
                return True
            tensor = as_tensor(view)
        self._asides.append(tensor)
        self._entries.append(2 * tensor.numel() + (storage is not None))
        return False


def _reduce_array(array: Any) -> Any:
    # Read-only arrays stay so with protocol 5, but not with the one that torch uses.
    return array.__reduce_ex__(_PROTOCOL) if array.flags.writeable else array.__reduce__()


# The name of this one is in the pickles.
def _typed_storage(
    memory: torch.UntypedStorage | bytes, dtype: torch.dtype
) -> torch.storage.TypedStorage:
    if isinstance(memory, torch.UntypedStorage):
        storage = memory
    else:
        storage = torch.UntypedStorage(len(memory))
        ctypes.memmove(storage.data_ptr(), memory, len(memory))
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
