"""MYCOLL_CPU=gloo and Options(cpu="gloo"): torch's gloo in place of the engine.

For ruling the engine out, and for platforms where the compiled module cannot be built: nothing here
needs it.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from mycoll._log import log

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, _DistributedBackendOptions

VARIABLE = "MYCOLL_CPU"


def is_wanted(options: Any) -> bool:
    """Whether a group with these pg_options is for gloo; they win over the environment."""
    chosen: str = getattr(options, "cpu", "")
    if chosen:
        return chosen == "gloo"
    return _is_gloo_by_default()


@functools.cache  # as of every variable, the first group's value counts
def _is_gloo_by_default() -> bool:
    value = os.environ.get(VARIABLE, "") or "engine"
    if value not in ("engine", "gloo"):
        raise ValueError(f"{VARIABLE}={value} is not valid: expected engine or gloo")
    return value == "gloo"


def create(group: _DistributedBackendOptions) -> Backend:
    """The group as torch's own backend="gloo" would make it."""
    from mycoll import replace

    log.warning(
        "mycoll: group '%s' carries CPU tensors over torch's gloo, as %s or Options(cpu=) says",
        group.group_id,
        VARIABLE,
    )
    backend: Backend = replace.real_gloo()(
        group.store, group.group_rank, group.group_size, group.timeout
    )
    backend._set_sequence_number_for_group()
    return backend
