"""Puts functions and classes in the place of torch's."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def replace(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps the function of torch.distributed with this name, if this torch has it."""
    from torch.distributed import distributed_c10d

    original = getattr(distributed_c10d, name, None)
    if original is None:
        return
    rebind(name, original, functools.wraps(original)(wrap(original)))


def rebind(name: str, original: Any, new: Any) -> None:
    """Replaces `original` by `new` in all modules that have it under this name."""
    # A program, or torch's device_mesh, may have imported it. Looks at the real types and the real
    # dictionaries of modules: lazy modules would otherwise run their code, and objects that only
    # pretend to be modules (cffi's libraries) have no dictionary.
    dictionary = vars(ModuleType)["__dict__"]
    for module in list(sys.modules.values()):
        if issubclass(type(module), ModuleType):
            names = dictionary.__get__(module) or {}
            if names.get(name) is original:
                names[name] = new
