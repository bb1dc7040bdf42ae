"""MYCOLL_REPLACE=gloo: mycoll answers to gloo's name.

Programs, and torch itself, make gloo groups by a name that torch lets nobody else have, and all of
them end at one class, `torch.distributed.ProcessGroupGloo`. In a process with the variable, a class
of mycoll's stands in its place: with its constructors, its options and devices, and right answers
to `isinstance`. Whatever is made by it is called "gloo" as before.

torch tells the class nothing but a store, a rank and a size. So one function of torch's is wrapped
as well: the one that knows which group is being made.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mycoll import _gloo
from mycoll._log import log
from mycoll._registration import REPLACE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store

VARIABLE = REPLACE
_INTERFACES = "MYCOLL_SOCKET_IFNAME"

_real: Any = None  # torch's class, once another one stands in its place
_is_installed = False
_has_warned_of_reconfigure = False


def is_in_place() -> bool:
    """Whether mycoll answers to gloo's name in this process."""
    return _real is not None


def real_gloo() -> Any:
    """torch's own class."""
    if _real is not None:
        return _real
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo


def variables_that_rename() -> list[str]:
    """Those that are set and make a group something else than its name says: mycoll under the name
    gloo, or gloo under the name mycoll."""
    values = {name: os.environ.get(name, "") for name in (VARIABLE, _gloo.VARIABLE)}
    return [f"{name}={value}" for name, value in values.items() if value not in ("", "engine")]


def keep_names_honest(program: str) -> None:
    """For programs that compare backends by name, before they start their ranks: takes these
    variables out of the environment that the ranks inherit, and says so."""
    for each in variables_that_rename():
        del os.environ[each.partition("=")[0]]
        print(f"{program}: ignores {each}: it compares backends by name", file=sys.stderr)


def install() -> None:
    """Puts mycoll in gloo's place, once in a process that has the variable.

    torch is being imported, which must not fail, nor warn in programs that make no groups. So what
    is in the way is reported when a gloo group is made: an invalid variable as an error, the rest
    as one warning, and the group is gloo's.
    """
    global _real, _is_installed
    from torch._C import _distributed_c10d

    from mycoll import _compat

    real = getattr(_distributed_c10d, "ProcessGroupGloo", None)
    if _is_installed or real is None:  # torch says that it has no gloo when somebody wants one
        return
    _is_installed = True

    try:
        module = _usable()
    except ValueError as error:
        _before_each(real, _refuse(error))
        return
    except Exception as error:
        _before_each(real, _warn_once(error))
        return

    _use_interface_of_gloo()
    _real = real
    _compat.rebind("ProcessGroupGloo", real, _make_class(module, real))
    _compat.replace("_new_process_group_helper", _wrap_new_process_group_helper)
    log.info("mycoll: answers to gloo's name in this process, as %s says", VARIABLE)


def _usable() -> Any:
    """The compiled module, if mycoll can stand in gloo's place; an exception says why not."""
    from mycoll._registration import native

    if (value := os.environ[VARIABLE]) != "gloo":
        raise ValueError(f"{VARIABLE}={value} is not valid: expected gloo")
    if _gloo.is_wanted(None):
        raise ImportError(f"{_gloo.VARIABLE}=gloo asks for torch's gloo")
    if os.environ.get("GLOO_DEVICE_TRANSPORT") == "TCP_TLS":
        raise ImportError("GLOO_DEVICE_TRANSPORT asks for encryption, which mycoll has not")
    return native()


def _before_each(real: Any, act: Callable[[], None]) -> None:
    """Calls `act` before torch's class makes a group, by whatever name it is reached."""
    original = real.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **more: Any) -> None:
        act()
        original(self, *args, **more)

    real.__init__ = init


def _refuse(error: ValueError) -> Callable[[], None]:
    def act() -> None:
        fix = "it was read when torch was imported: correct it, and start the program again"
        raise ValueError(f"{error}; {fix}")

    return act


def _warn_once(error: Exception) -> Callable[[], None]:
    @functools.cache
    def act() -> None:
        warnings.warn(f"{VARIABLE}=gloo has no effect: {error}", stacklevel=4)

    return act


def _use_interface_of_gloo() -> None:
    """GLOO_SOCKET_IFNAME, a list of exact names, unless mycoll's own variable is set."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if names and not os.environ.get(_INTERFACES):
        os.environ[_INTERFACES] = f"={names}"


# --- which group torch is making ------------------------------------------------------------------


class _Making(threading.local):
    """The group that this thread is in the middle of making."""

    name = ""
    ranks: list[int] = []  # noqa: RUF012 - replaced as a whole
    count = 0  # of backends made for it


_making = _Making()


def _wrap_new_process_group_helper(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def new_process_group_helper(*args: Any, **more: Any) -> Any:
        given = signature.bind(*args, **more).arguments
        before = (_making.name, _making.ranks, _making.count)
        ranks = given["global_ranks_in_group"] or range(given["group_size"])
        _making.name, _making.ranks, _making.count = str(given["group_name"]), list(ranks), 0
        try:
            return original(*args, **more)
        finally:
            _making.name, _making.ranks, _making.count = before

    return new_process_group_helper


def _identity(size: int, options: Any) -> tuple[str, list[int], bool]:
    """The group's name, its members in the job, and whether it is one of the job's groups."""
    if _making.name and len(_making.ranks) == size:
        _making.count += 1
        # Under TORCH_DISTRIBUTED_DEBUG=DETAIL torch makes a second one beside each.
        suffix = f" (helper {_making.count - 1})" if _making.count > 1 else ""
        return _making.name + suffix, _making.ranks, True
    ranks = list(options.global_ranks_in_group)
    return options.group_name or "gloo", ranks if len(ranks) == size else [], False


# --- the class ------------------------------------------------------------------------------------


def _warn_of_reconfigure() -> None:
    """Once in a process."""
    global _has_warned_of_reconfigure
    if _has_warned_of_reconfigure:
        return
    _has_warned_of_reconfigure = True
    warnings.warn(
        f"{VARIABLE}=gloo: groups that are made with enable_reconfigure=True stay gloo's, as "
        "mycoll has no reconfigure",
        stacklevel=3,
    )


def _make_class(module: Any, real: Any) -> type[Backend]:
    from torch._C._distributed_c10d import Backend
    from torch.distributed.constants import default_pg_timeout

    from mycoll import _registration

    class Like(type(module.MycollBackend)):  # type: ignore[misc]
        """isinstance(): torch may hand out a group's backend as the compiled class."""

        def __call__(cls, *args: Any, enable_reconfigure: bool = False, **more: Any) -> Any:
            # What torch 2.15 has begun to pass, and nearly always as False.
            if enable_reconfigure:
                _warn_of_reconfigure()
                return real(*args, enable_reconfigure=True, **more)
            return super().__call__(*args, **more)

        def __instancecheck__(cls, instance: Any) -> bool:
            if super().__instancecheck__(instance):
                return True
            if cls is not ProcessGroupGloo:
                return False
            is_ours = isinstance(instance, module.MycollBackend) and instance.name() == "gloo"
            return is_ours or isinstance(instance, real)

    class ProcessGroupGloo(module.MycollBackend, metaclass=Like):  # type: ignore[misc]
        """mycoll in the place of torch's class of this name, as MYCOLL_REPLACE=gloo says."""

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
        ) -> None:
            # As torch's class has it, the fourth argument is either.
            if options is None and isinstance(timeout, Backend.Options):
                options = timeout
            elif options is None:
                options = real._Options()
                options._timeout = timeout
            name, ranks, of_job = _identity(size, options)
            if of_job:
                store = _registration.store_of_this_attempt(store)
            _registration.prepare(module)
            super().__init__(
                store,
                rank,
                size,
                options._timeout,
                name,
                ranks,
                None,
                _registration.has_device(),
                of_job,
                options,
            )

    ProcessGroupGloo.__module__ = real.__module__
    ProcessGroupGloo.__qualname__ = real.__name__
    return ProcessGroupGloo
