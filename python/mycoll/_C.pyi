"""The compiled module, csrc/bindings. tests/test_stub.py holds this file against it."""

from datetime import timedelta
from typing import TypedDict

import torch
from torch._C._distributed_c10d import Backend, Store

# The torch that the module was compiled for.
torch_version: str

class EnvEntry(TypedDict):
    """One MYCOLL_* variable."""

    name: str
    default: str
    value: str
    help: str
    is_set: bool
    # "default", or the variable that the value comes from.
    source: str

class Options(Backend.Options):
    """What may be chosen for one group: pg_options= of init_process_group and new_group."""

    # How long an operation may take; a timeout= given to torch wins over it.
    timeout: timedelta
    # Who serves CPU tensors: "engine", "gloo", or "" for what MYCOLL_CPU says.
    cpu: str
    def __init__(self, timeout: timedelta = ..., cpu: str = ...) -> None: ...
    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[int, object]) -> Options: ...

class MycollBackend(Backend):
    """One rank's end of a group."""

    @property
    def options(self) -> Options: ...
    def transport(self) -> str: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...
    def _set_default_timeout(self, timeout: timedelta) -> None: ...

def create_backend(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    group_id: str,
    global_ranks: list[int],
    options: Options | None = ...,
) -> MycollBackend: ...
def environment() -> list[EnvEntry]: ...
def dump_trace(path: str) -> str: ...
def copy_streaming(destination: int, source: int, bytes: int) -> None: ...
