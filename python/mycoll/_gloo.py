"""torch's gloo: in place of the engine, with MYCOLL_CPU=gloo and Options(cpu="gloo").

It helps to rule the engine out as a cause, and works on platforms without the compiled module.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from mycoll._log import log
from mycoll._native import CPU, REPLACE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, _DistributedBackendOptions


def is_replaced() -> bool:
    """Whether mycoll has gloo's name in this process (replace.py)."""
    import torch.distributed as dist

    return hasattr(getattr(dist, "ProcessGroupGloo", None), "replaced")


def real_gloo() -> Any:
    """torch's own class, also while another one is in its place."""
    from torch.distributed import ProcessGroupGloo

    return getattr(ProcessGroupGloo, "replaced", ProcessGroupGloo)


def variables_that_rename() -> list[str]:
    """The variables that are set and give a backend another one's name, as NAME=VALUE."""
    values = {name: os.environ.get(name, "") for name in (REPLACE, CPU)}
    return [f"{name}={value}" for name, value in values.items() if value not in ("", "engine")]


def keep_names_honest(program: str) -> None:
    """Removes such variables from the environment that ranks will inherit, and prints a message.

    For programs that compare backends by name.
    """
    for each in variables_that_rename():
        del os.environ[each.partition("=")[0]]
        print(f"{program}: ignores {each}: it compares backends by name", file=sys.stderr)


def is_wanted(options: Any) -> bool:
    """Whether a group with these pg_options is for gloo; they win over the environment."""
    return (getattr(options, "cpu", "") or _default()) == "gloo"


@functools.cache  # as of every variable, the first group's value counts
def _default() -> str:
    return os.environ.get(CPU, "")


def create(group: _DistributedBackendOptions) -> Backend:
    """The group as torch's own backend="gloo" would make it."""
    log.warning(
        "mycoll: group '%s' carries CPU tensors over torch's gloo, as %s or Options(cpu=) says",
        group.group_id,
        CPU,
    )
    backend: Backend = real_gloo()(group.store, group.group_rank, group.group_size, group.timeout)
    backend._set_sequence_number_for_group()
    return backend
