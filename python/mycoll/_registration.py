"""How torch finds mycoll, and how mycoll finds its compiled half.

torch calls `autoload` while it is being imported (entry point torch.backends), so nothing here may
import torch outside a function, take long, start a thread, or raise. What goes wrong is remembered
and raised when somebody uses the backend.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mycoll._log import log
from mycoll._version import SUPPORTED_TORCH, __version__

if TYPE_CHECKING:
    from types import ModuleType

    from torch._C._distributed_c10d import Backend, Store, _DistributedBackendOptions

NAME = "mycoll"
REPLACE = "MYCOLL_REPLACE"  # replace.py

_NCCL_UNDEFINED = -(2**31)  # in a ProcessGroupNCCL.NCCLConfig: NCCL chooses


class NotUsable(ImportError):
    """mycoll cannot be used here; the fix is apart from the problem, for `mycoll doctor`."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}: {fix}")
        self.problem = problem
        self.fix = fix


_warned = False
_failure: Exception | None = None


def autoload() -> None:
    """What torch calls while it is imported."""
    global _failure
    for step in (register, replace_gloo):
        try:
            step()
        except Exception as error:
            _failure = _failure or error


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


def replace_gloo() -> None:
    """Puts mycoll in gloo's place where MYCOLL_REPLACE says so."""
    if os.environ.get(REPLACE):
        from mycoll import replace

        replace.install()


def close_all() -> None:
    """Ends the groups that were never destroyed."""
    module = sys.modules.get("mycoll._C")
    if module is not None:
        from mycoll import _leaving

        # Python has printed an exception's traceback before it runs this.
        module._close_all(_leaving.reason_to_end())


def register_mpi_scheme() -> None:
    """init_method="mpi://", unless somebody else serves it already."""
    from torch.distributed.rendezvous import register_rendezvous_handler

    def meet(url: str, timeout: timedelta = timedelta(minutes=30), **more: Any) -> Iterator[Any]:
        from mycoll.rendezvous import rendezvous

        return rendezvous(url, timeout, **more)

    with contextlib.suppress(RuntimeError):
        register_rendezvous_handler("mpi", meet)


def native() -> ModuleType:
    """mycoll._C, loaded on first use; an ImportError says what to do."""
    if _failure is not None:
        raise ImportError(f"mycoll could not register itself: {_failure!r}") from _failure
    from mycoll import _C

    return _C


def load() -> ModuleType:
    """The compiled module for the torch that is running, for mycoll._C to become.

    Each minor of torch has its own, in a folder of its own: the virtual functions of torch's C++
    classes differ between minors, and a module built for another one imports happily and then
    crashes.
    """
    import torch

    if sys.platform != "linux":
        raise NotUsable(
            f"mycoll works on Linux, and this is {sys.platform}",
            "with MYCOLL_CPU=gloo, groups called mycoll are torch's gloo",
        )
    running = _minor(torch.__version__)
    folders = {
        folder.name.removeprefix("torch"): folder
        for folder in Path(__file__).parent.glob("torch[0-9]*")
    }
    built = sorted(folders, key=_numbers)
    oldest, newest = SUPPORTED_TORCH
    is_supported = oldest <= _numbers(running) <= newest
    supported = f"mycoll supports torch {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    if built and running not in folders:
        problem = (
            f"this mycoll was compiled for torch {', '.join(built)} and cannot work with torch "
            f"{torch.__version__}"
        )
        fix = f"{supported}: pip install 'torch=={built[-1]}.*'"
        if is_supported:
            fix = "run `pip install --no-build-isolation .` again in its source folder, "
            fix += f"or install torch {built[-1]}"
        raise NotUsable(problem, fix)
    spec = PathFinder.find_spec("mycoll._C", [str(folders[running])]) if built else None
    if spec is None or spec.loader is None:
        raise NotUsable(
            "mycoll's compiled module is missing",
            "run `pip install --no-build-isolation .` in its source folder"
            if is_supported
            else f"{supported}, and this is torch {torch.__version__}",
        )
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise NotUsable(
            f"mycoll's compiled module does not load ({error})",
            "run `pip install --no-build-isolation .` again in its source folder",
        ) from error
    return module


def create(group: _DistributedBackendOptions, options: Any) -> Backend:
    """What torch calls to make a group: `options` is the user's pg_options, or None."""
    from torch._C._distributed_c10d import Backend
    from torch.distributed.constants import default_pg_timeout

    from mycoll import _compat, _gloo

    log.info(
        "mycoll %s: group '%s', rank %d of %d, timeout %s",
        __version__,
        group.group_id,
        group.group_rank,
        group.group_size,
        group.timeout,
    )
    group.store = store_of_this_attempt(group.store)
    try:
        is_for_gloo = _gloo.is_wanted(options)
    except ValueError as error:
        raise ValueError(f"mycoll group '{group.group_id}': {error}") from None
    if is_for_gloo:
        _compat.install()
        return _gloo.create(group)

    module = native()
    prepare(module)
    if options is not None and not isinstance(options, module.Options):
        if not isinstance(options, Backend.Options):
            raise TypeError(
                f"pg_options of a mycoll group is a mycoll.Options, not {type(options).__name__}"
            )
        options = from_foreign_options(options)

    _compat.install()
    timeout = group.timeout
    if options is not None and timeout == default_pg_timeout:
        timeout = options.timeout  # torch always passes one: nobody has given it this
    return module.MycollBackend(  # type: ignore[no-any-return]
        group.store,
        group.group_rank,
        group.group_size,
        timeout,
        group.group_id,
        # Empty: the world.
        list(group.global_ranks_in_group) or list(range(group.group_size)),
        options,
        has_device(),
    )


def prepare(module: ModuleType) -> None:
    """Before a group is made."""
    from mycoll import _compat, _leaving, objects

    _compat.guard_coalescing()
    objects.install()
    _leaving.watch_child()
    warn_of_unknown_variables(module)
    module.set_nccl_wheel(nccl_wheel())
    if is_rocm():
        module.set_why_no_devices(
            "mycoll does not support ROCm: give those tensors to torch's own backend, as in "
            "backend='cpu:mycoll,cuda:nccl'"
        )


def from_foreign_options(options: Any) -> Any:
    """What torch's own NCCL options say about NCCL's communicators; None for other backends', which
    a group like "cpu:mycoll,cuda:xccl" passes to both of its backends. Their timeout is that of
    their backend, unless somebody has set it; torch passes the group's beside them."""
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


def has_device() -> bool:
    """Whether this process can have tensors on a device: only then a group is made for those."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if is_rocm():
        return False
    if accelerator is None or accelerator.type != "cuda":
        return accelerator is not None
    # CUDA builds of torch name CUDA, with and without a GPU. This count leaves the runtime alone:
    # who initialises that must not fork any more.
    return torch.cuda.device_count() > 0


def is_rocm() -> bool:
    """Whether this torch is built for AMD's GPUs, which it names "cuda", and whose RCCL has the
    names of NCCL's functions: nothing here was ever run with either."""
    import torch

    return torch.version.hip is not None


def nccl_wheel() -> str:
    """The library of the nvidia-nccl wheel that torch's CUDA builds depend on; '' without one."""
    import torch

    if torch.version.cuda is None:
        return ""
    with contextlib.suppress(ImportError):
        spec = importlib.util.find_spec("nvidia.nccl")
        for folder in (spec.submodule_search_locations or []) if spec else []:
            library = Path(folder) / "lib" / "libnccl.so.2"
            if library.exists():
                return str(library)
    return ""


def warn_of_unknown_variables(module: ModuleType) -> None:
    """Once in a process, and in the first of those that a launcher starts on a host."""
    global _warned
    if _warned or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    _warned = True
    for name, nearest in module.unknown_variables():
        hint = f"did you mean {nearest}?" if nearest else "`mycoll env` lists those that are"
        warnings.warn(f"{name} is not a variable of mycoll's; {hint}", stacklevel=2)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _numbers(minor: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor.split("."))


def store_of_this_attempt(store: Store) -> Store:
    """Hides what earlier attempts of a torchrun job wrote: its store outlives a restart.

    Only with one agent: several count the failures of their own workers each, and do not agree.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return store
    from torch.distributed import PrefixStore

    log.info("mycoll: attempt %s of torchrun's job: what earlier ones wrote is not read", attempt)
    return PrefixStore(f"attempt{attempt}", store)
