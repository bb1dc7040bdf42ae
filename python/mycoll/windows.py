"""One-sided communication: memory of each rank that the others write to, and read where they can.

The same calls as torch's own windows (torch 2.14 and later), under all versions of torch. See
docs/guide.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mycoll._groups import backend_of

if TYPE_CHECKING:
    from mycoll._C import Window


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
    backend = backend_of(group)
    if backend is None:
        raise ValueError(
            f"{dist.get_backend(group)!r} serves the group's CPU tensors, not mycoll: it has no "
            "windows of mycoll's"
        )
    return backend.new_window(tensor)  # type: ignore[no-any-return]
