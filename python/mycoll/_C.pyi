"""The compiled module, csrc/bindings. tests/test_stub.py holds this file against it."""

from datetime import timedelta
from typing import TypedDict

from torch._C._distributed_c10d import Backend, Store

class EnvEntry(TypedDict):
    name: str
    default: str
    value: str
    help: str
    is_set: bool

class Options(Backend.Options):
    cpu: str
    def __init__(self, timeout: timedelta = ..., cpu: str = ...) -> None: ...

def create_backend(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    group_id: str,
    global_ranks: list[int],
    options: Options | None,
) -> Backend: ...
def environment() -> list[EnvEntry]: ...
