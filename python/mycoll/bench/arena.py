"""Buffers that are not in cache when a call meets them.

A case's buffers are windows of one allocation that is larger than the last-level cache, used in
turn. A case too small for that has as many windows as a round has calls, and the caches are
overwritten before each round.
"""

from __future__ import annotations

import torch

from mycoll.bench.world import World

# Windows start on a cache line, but not at the same place of a page: caches are indexed by address.
_LINE_BYTES = 64
_GAP_BYTES = 4096 + _LINE_BYTES
MAX_WINDOWS = 1024


def plan(window_bytes: int, world: World, hot: bool, busy_ranks: int) -> tuple[int, int]:
    """How many windows of what one call touches, and the bytes to overwrite before a round.

    The busy ranks of a host together cover its last-level caches twice; a GPU's rank its L2 twice.
    """
    if hot:
        return 1, 0
    if world.device.type == "cuda":
        share = 2 * int(torch.cuda.get_device_properties(world.device).L2_cache_size)
    else:
        share = 2 * world.cache_bytes // busy_ranks
    windows = max(2, min(MAX_WINDOWS, share // max(1, window_bytes) + 1))
    rest = share - windows * window_bytes if world.device.type == "cpu" else 0
    return windows, max(0, rest)


class Arena:
    """The windows of a case, and what overwrites the caches before a round."""

    def __init__(self, window_bytes: int, world: World, hot: bool, busy_ranks: int) -> None:
        self.windows, evicted = plan(window_bytes, world, hot, busy_ranks)
        self._stride = aligned(window_bytes) + _GAP_BYTES
        memory = self._stride * self.windows
        self.memory: torch.Tensor = torch.empty(memory, dtype=torch.uint8, device=world.device)
        self._evictor = torch.zeros(evicted // 8, dtype=torch.int64)

    def window(self, index: int, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` elements at a byte offset of a window; the offset is a multiple of a line."""
        begin = index * self._stride + offset
        return self.memory[begin : begin + count * dtype.itemsize].view(dtype)

    def refill(self, dtype: torch.dtype) -> None:
        """Ones everywhere.

        Reducing them again and again stays finite for a round, meets no denormals that slow it
        down, and no cache that treats zeros apart.
        """
        usable = self.memory.numel() // dtype.itemsize * dtype.itemsize
        self.memory[:usable].view(dtype).fill_(1)
        if self._evictor.numel():
            self._evictor.add_(1)


def aligned(size: int) -> int:
    """A size, rounded up to whole cache lines."""
    return -(-size // _LINE_BYTES) * _LINE_BYTES
