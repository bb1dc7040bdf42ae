"""How torch finds mycoll: its entry points, and the hooks that they leave in torch.

torch calls `autoload` while it is being imported. So nothing here may import torch at the top of
the file, take long, start a thread, or raise: an error is kept, and raised when mycoll is used.
All imports inside of functions are there for this reason.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mycoll._native import NAME, REPLACE, remember

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, _DistributedBackendOptions


def autoload() -> None:
    """Registers mycoll; torch calls it while it is imported."""
    for step in (register, replace_gloo):
        try:
            step()
        except Exception as error:
            remember(error)


def is_called_later() -> bool:
    """Whether torch has not been imported yet, and will call autoload() by itself: commands that
    need no torch, such as --help, then start without it."""
    if sys.modules.get("torch") is not None:
        return False
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return False
    known = importlib.metadata.entry_points(group="torch.backends")
    return any(each.name == NAME for each in known)


def register() -> None:
    """Registers the backend with torch.distributed, once."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        # A list: torch up to 2.13 reads the string "cpu" as the devices c, p and u.
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
        register_mpi_scheme()
        # The first of all: what programs register runs before it, and may still communicate.
        atexit.register(close_all)


def create(group: _DistributedBackendOptions, options: Any) -> Backend:
    """Makes a group's backend, when torch asks for it."""
    from mycoll import _create

    return _create.create(group, options)


def replace_gloo() -> None:
    """Puts mycoll in gloo's place if MYCOLL_REPLACE is set."""
    if os.environ.get(REPLACE):
        from mycoll import replace

        replace.install()


def close_all() -> None:
    """Ends the groups that were never destroyed."""
    from mycoll import _leaving

    # Python has printed an exception's traceback before it runs this.
    _leaving.close_all(_leaving.reason_to_end())


def register_mpi_scheme() -> None:
    """Adds init_method="mpi://", unless another library has it already."""
    from torch.distributed.rendezvous import register_rendezvous_handler

    def meet(url: str, *options: Any, **more: Any) -> Iterator[Any]:
        from mycoll.rendezvous import rendezvous

        return rendezvous(url, *options, **more)

    with contextlib.suppress(RuntimeError):
        register_rendezvous_handler("mpi", meet)
