"""CPU tensors that the other ranks of a host read in place.

When the ranks of a host pass such tensors, or views of them, to a collective, no other memory is
involved. Ranks may mix them with ordinary tensors. See docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mycoll._native import native


@contextmanager
def shared_tensors() -> Iterator[None]:
    """A context in which this thread's CPU tensors are made in memory that the other ranks of the
    host read in place: also parameters and buckets.

    The tensors are ordinary ones otherwise, and outlive the context. Contexts may be nested.

    Raises:
        RuntimeError: Another library has put its allocator of CPU tensors before all others.

    Example:
        with mycoll.shared_tensors():
            model = torch.nn.Linear(8, 8)
    """
    module = native()
    module._open_shared_tensors()
    try:
        yield
    finally:
        module._close_shared_tensors()


def empty(*size: Any, **options: Any) -> torch.Tensor:
    """Makes a tensor in shared memory, like `torch.empty()`.

    Args:
        size: The size, as for torch.empty().
        options: Its options, except `out`, `pin_memory` and devices other than the CPU.

    Returns:
        The tensor, on the CPU.

    Raises:
        ValueError: An option asks for other memory.

    Example:
        bucket = mycoll.empty(1 << 20, dtype=torch.bfloat16)
    """
    return _make(torch.empty, *size, **options)


def zeros(*size: Any, **options: Any) -> torch.Tensor:
    """Makes a tensor in shared memory, like `torch.zeros()`.

    Args:
        size: The size, as for torch.zeros().
        options: Its options, except `out`, `pin_memory` and devices other than the CPU.

    Returns:
        The tensor, on the CPU.

    Raises:
        ValueError: An option asks for other memory.

    Example:
        counts = mycoll.zeros(8, dtype=torch.int64)
    """
    return _make(torch.zeros, *size, **options)


def empty_like(other: torch.Tensor, **options: Any) -> torch.Tensor:
    """Makes a tensor in shared memory, like `torch.empty_like()`.

    Args:
        other: The tensor whose size and dtype are taken; it may be on another device.
        options: As for `mycoll.empty()`.

    Returns:
        The tensor, on the CPU.

    Raises:
        ValueError: An option asks for other memory.

    Example:
        result = mycoll.empty_like(torch.ones(4, 4))
    """
    return _make(torch.empty_like, other, **options)


def _make(function: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
    """Calls a function of torch that makes a tensor, but not in other memory."""
    device = options.pop("device", None)
    if isinstance(device, int) or torch.device(device or "cpu").type != "cpu":
        raise ValueError("shared tensors are CPU tensors; leave out device=")
    for name in ("pin_memory", "out"):
        value = options.get(name)
        if value is not None and value is not False:
            raise ValueError(f"shared tensors are in memory of their own; leave out {name}=")
    with shared_tensors():
        return function(*args, device="cpu", **options)
