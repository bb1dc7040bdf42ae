"""Groups without torch.distributed's global state: `mycoll.process_group`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed import PrefixStore, ProcessGroup
from torch.distributed.constants import default_pg_timeout

from mycoll import _create

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from mycoll._C import Options


def process_group(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout: timedelta | None = None,
    name: str = "group",
    pg_options: Options | None = None,
) -> ProcessGroup:
    """A group of `size` ranks that meet in `store`; returns when all of them are there.

    It needs no init_process_group, and dist does not know of it. A process may have any number of
    them, be several ranks of one group (in threads), and make and drop them in any order, from any
    thread. `shutdown()` leaves it, `abort()` ends it for all ranks.

    timeout: for the meeting and for each operation; 30 minutes unless pg_options say otherwise.
    name: the same on all ranks. Groups that share a store at one time need names of their own.
    """
    if timeout is None:
        timeout = default_pg_timeout if pg_options is None else pg_options.timeout
    module = _create.prepare()
    own_store = PrefixStore(f"mycoll {name}/", store)
    backend = module.MycollBackend(
        own_store,
        rank,
        size,
        timeout,
        name,
        [],
        pg_options,
        _create.has_device(),
        of_job=False,
    )
    group = ProcessGroup(own_store, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, backend)
    group._set_group_name(name)  # type: ignore[arg-type]
    return group
