"""Makes the backends of groups."""

from __future__ import annotations

import functools
import os
import warnings
from types import ModuleType
from typing import Any

import torch
from torch._C._distributed_c10d import Backend, Store, _DistributedBackendOptions
from torch.distributed.constants import default_pg_timeout

from mycoll import _compat, _gloo, _leaving, objects
from mycoll._log import log
from mycoll._native import ENCRYPT, native, nccl_wheel, unknown_variables
from mycoll._version import __version__


def create(group: _DistributedBackendOptions, options: Any) -> Backend:
    """Makes the backend of a group for torch: `options` is the user's pg_options, or None."""
    place = f"rank {group.group_rank} of {group.group_size}"
    log.info(f"mycoll {__version__}: group '{group.group_id}', {place}, timeout {group.timeout}")
    group.store = store_of_this_attempt(group.store)
    _compat.install()
    if _gloo.is_wanted(options):
        if os.environ.get(ENCRYPT, "") not in ("", "0"):
            raise ValueError(f"{ENCRYPT}=1 needs mycoll's engine, and this group is to be gloo's")
        return _gloo.create(group)
    module = prepare()
    options = _compat.own_options(options)
    if options is not None and not isinstance(options, module.Options):
        raise TypeError(
            f"pg_options of a mycoll group is a mycoll.Options, not {type(options).__name__}"
        )
    timeout = group.timeout
    if options is not None and timeout == default_pg_timeout:
        timeout = options.timeout  # torch's default, which it always passes
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
        enable_reconfigure=getattr(group, "enable_reconfigure", False),  # since 2.14
    )


def prepare() -> ModuleType:
    """The compiled module, ready for a group to be made."""
    module = native()
    _compat.guard_errors()
    objects.install()
    _leaving.watch_child()
    warn_of_unknown_variables()
    module.set_nccl_wheel(nccl_wheel())
    if torch.version.hip is not None:  # AMD's GPUs, which torch names "cuda"
        module.set_why_no_devices(
            "mycoll does not support ROCm: give those tensors to torch's own backend, as in "
            "backend='cpu:mycoll,cuda:nccl'"
        )
    return module


def has_device() -> bool:
    """Whether this process can have tensors on a device, so that groups need to serve those."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or torch.version.hip is not None:
        return False
    # CUDA builds of torch name CUDA, with and without a GPU. This count does not initialise CUDA's
    # runtime, after which a process cannot fork.
    return accelerator.type != "cuda" or torch.cuda.device_count() > 0


@functools.cache
def warn_of_unknown_variables() -> None:
    """Once in a process, and on a host only in the first rank that a launcher starts."""
    for name, hint in unknown_variables() if os.environ.get("LOCAL_RANK", "0") == "0" else ():
        warnings.warn(f"{name} is not a variable of mycoll's; {hint}", stacklevel=2)


def store_of_this_attempt(store: Store) -> Store:
    """Hides what earlier attempts of a torchrun job wrote: its store outlives a restart.

    Only with one agent: several count the failures of their own workers each, and do not agree.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return store
    log.info("mycoll: attempt %s of torchrun's job: what earlier ones wrote is not read", attempt)
    return torch.distributed.PrefixStore(f"attempt{attempt}", store)
