"""MYCOLL_REPLACE=gloo: mycoll takes gloo's place.

Programs, and torch itself, make gloo groups by a name that torch reserves for gloo, and all of them
are instances of one class, `torch.distributed.ProcessGroupGloo`. In a process with the variable, a
class of mycoll's replaces it: with its constructors, its options and devices, and right answers to
`isinstance`. Its groups are called "gloo" as before.

torch gives the class only a store, a rank and a size. So the function of torch that knows which
group is being made is wrapped, too.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mycoll import _create, _gloo, _groups
from mycoll._log import log
from mycoll._native import CPU, REPLACE, native

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store

_INTERFACES = "MYCOLL_SOCKET_IFNAME"


@functools.cache
def install() -> None:
    """Puts mycoll in gloo's place, once in a process that has the variable.

    torch is being imported, which must not fail, and must not warn in programs that make no groups.
    So an obstacle is reported when a gloo group is made: an invalid variable as an error, others as
    one warning, and the group is gloo's.
    """
    from torch._C import _distributed_c10d

    real = getattr(_distributed_c10d, "ProcessGroupGloo", None)
    if real is None:  # torch itself raises an error if a program uses gloo
        return
    try:
        if (value := os.environ[REPLACE]) != "gloo":
            raise ValueError(f"{REPLACE}={value} is not valid: expected gloo")
        if _gloo.is_wanted(None):
            raise ImportError(f"{CPU}=gloo asks for torch's gloo")
        module = native()
    except Exception as error:
        _report_later(real, error)
        return

    # A list of exact names.
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if names and not os.environ.get(_INTERFACES):
        os.environ[_INTERFACES] = f"={names}"
    _groups.rebind("ProcessGroupGloo", real, _make_class(module, real))
    _groups.replace("_new_process_group_helper", _wrap_new_process_group_helper)
    log.info("mycoll: answers to gloo's name in this process, as %s says", REPLACE)


def _report_later(real: Any, error: Exception) -> None:
    """Before torch's class makes a group, by whatever name it is reached: raises an error if the
    variable is invalid; else warns, once in a process."""
    original, is_warned = real.__init__, False

    @functools.wraps(original)
    def init(self: Any, *args: Any, **more: Any) -> None:
        nonlocal is_warned
        if isinstance(error, ValueError):
            fix = "it was read when torch was imported: correct it, and start the program again"
            raise ValueError(f"{error}; {fix}")
        if not is_warned:
            warnings.warn(f"{REPLACE}=gloo has no effect: {error}", stacklevel=3)
            is_warned = True
        original(self, *args, **more)

    real.__init__ = init


# --- which group torch is making ------------------------------------------------------------------


@dataclass
class _Making:
    """A group that a thread is in the middle of making."""

    name: str
    ranks: list[int]
    count: int = 0  # of backends made for it


_making: ContextVar[_Making | None] = ContextVar("making", default=None)


def _wrap_new_process_group_helper(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def new_process_group_helper(*args: Any, **more: Any) -> Any:
        given = signature.bind(*args, **more).arguments
        ranks = given["global_ranks_in_group"] or range(given["group_size"])
        before = _making.set(_Making(str(given["group_name"]), list(ranks)))
        try:
            return original(*args, **more)
        finally:
            _making.reset(before)

    return new_process_group_helper


def _identity(size: int, options: Any) -> tuple[str, list[int], bool]:
    """The group's name, its members in the job, and whether it is one of the job's groups."""
    making = _making.get()
    if making and making.name and len(making.ranks) == size:
        making.count += 1
        # Under TORCH_DISTRIBUTED_DEBUG=DETAIL torch makes a second one beside each.
        suffix = f" (helper {making.count - 1})" if making.count > 1 else ""
        return making.name + suffix, making.ranks, True
    ranks = list(options.global_ranks_in_group)
    return options.group_name or "gloo", ranks if len(ranks) == size else [], False


# --- the class ------------------------------------------------------------------------------------


def _make_class(module: Any, real: Any) -> type[Backend]:
    from torch._C._distributed_c10d import Backend
    from torch.distributed.constants import default_pg_timeout

    class Like(type(module.MycollBackend)):  # type: ignore[misc]
        """isinstance(): torch may hand out a group's backend as the compiled class."""

        def __instancecheck__(cls, instance: Any) -> bool:
            if super().__instancecheck__(instance):
                return True
            if cls is not ProcessGroupGloo:
                return False
            is_ours = isinstance(instance, module.MycollBackend) and instance.name() == "gloo"
            return is_ours or isinstance(instance, real)

    class ProcessGroupGloo(module.MycollBackend, metaclass=Like):  # type: ignore[misc]
        """mycoll in the place of torch's class of this name, as MYCOLL_REPLACE=gloo says."""

        replaced = real
        Device = real.Device
        _Options = real._Options
        create_device = staticmethod(real.create_device)
        create_default_device = staticmethod(real.create_default_device)

        def __init__(
            self,
            store: Store,
            rank: int,
            size: int,
            timeout: timedelta | float | Any = default_pg_timeout,
            *,
            options: Any = None,
            enable_reconfigure: bool = False,  # since torch 2.14
        ) -> None:
            # As torch's class has it, the fourth argument is either.
            if options is None and isinstance(timeout, Backend.Options):
                options = timeout
            elif options is None:
                options = real._Options()
                options._timeout = timeout
            name, ranks, of_job = _identity(size, options)
            if of_job:
                store = _create.store_of_this_attempt(store)
            _create.prepare()
            super().__init__(
                store,
                rank,
                size,
                options._timeout,
                name,
                ranks,
                None,
                _create.has_device(),
                of_job,
                options,
                enable_reconfigure or getattr(options, "enable_reconfigure", False),
            )

    ProcessGroupGloo.__module__ = real.__module__
    ProcessGroupGloo.__qualname__ = real.__name__
    return ProcessGroupGloo
