"""The compiled module, csrc/bindings. tests/test_stub.py holds this file against it."""

from datetime import timedelta
from typing import Any, TypedDict

import torch
from torch._C._distributed_c10d import Backend, Store, Work

# The torch that the module was compiled for.
torch_version: str

class ArgumentError(ValueError, RuntimeError):
    """An argument that cannot be."""

class EnvEntry(TypedDict):
    """One MYCOLL_* variable."""

    name: str
    default: str
    value: str
    help: str
    is_set: bool
    # "default", or the variable that the value comes from.
    source: str

class NcclOptions:
    """What NCCL's communicators of a group are made with.

    None, or "" for a name: NCCL's own choice.
    """

    # Whether calls into NCCL return only when their work is enqueued.
    is_blocking: bool | None
    # Thread blocks of NCCL's kernels: the least number, the largest, and how many form a cluster.
    min_ctas: int | None
    max_ctas: int | None
    cga_cluster_size: int | None
    # Thread blocks for NVLink SHARP.
    nvls_ctas: int | None
    # 0: speed; 1: few thread blocks; 2: none where copy engines can serve.
    cta_policy: int | None
    # The network's quality of service.
    traffic_class: int | None
    # The network module, such as Socket or IB.
    net_name: str

class Options(Backend.Options):
    """What may be chosen for one group: pg_options= of init_process_group and new_group."""

    # How long an operation may take; a timeout= given to torch wins over it.
    timeout: timedelta
    # Who serves CPU tensors: "engine", "gloo", or "" for what MYCOLL_CPU says.
    cpu: str
    def __init__(self, timeout: timedelta = ..., cpu: str = ...) -> None: ...
    @property
    def nccl(self) -> NcclOptions: ...
    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[int, object]) -> Options: ...

class MycollBackend(Backend):
    """One rank's end of a group."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        group_id: str,
        global_ranks: list[int],
        options: Options | None = ...,
        has_device: bool = ...,
        of_job: bool = ...,
        shown: Backend.Options | None = ...,
    ) -> None: ...
    # mycoll's, or those of the backend in whose place this one is.
    @property
    def options(self) -> Backend.Options: ...
    @property
    def _name(self) -> str: ...
    def transport(self) -> str: ...
    def device_transport(self) -> str: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...
    # By torch's names for its nccl: mycoll.memory.
    @property
    def mem_allocator(self) -> Any: ...
    def register_mem_pool(self, pool: torch.cuda.MemPool, symm: bool = ...) -> None: ...
    def deregister_mem_pool(self, pool: torch.cuda.MemPool) -> None: ...
    def supports_tensor_alloc(self, device: torch.device) -> bool: ...
    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor: ...
    @property
    def supports_window(self) -> bool: ...
    def new_window(self, tensor: torch.Tensor | None = ...) -> Window: ...
    def _comm_ptr(self) -> int: ...
    def _register_memory(self, device: str, address: int, bytes: int, symmetric: bool) -> None: ...
    def _deregister_memory(self, address: int) -> None: ...
    def _split_devices(self, child: MycollBackend | None, willing: bool) -> None: ...
    def _set_default_timeout(self, timeout: timedelta) -> None: ...

class PutOptions:
    timeout: timedelta
    hints: dict[str, str]
    def __init__(self) -> None: ...

class SignalOptions:
    timeout: timedelta
    hints: dict[str, str]
    def __init__(self) -> None: ...

class WaitSignalOptions:
    timeout: timedelta
    hints: dict[str, str]
    def __init__(self) -> None: ...

class WindowAccessType:
    UNIFIED: WindowAccessType
    SEPARATE: WindowAccessType

class WindowAttr:
    @property
    def access_type(self) -> WindowAccessType: ...

class Window:
    """Memory of each rank that the others write to; under torch 2.14 and later one of torch's."""

    def tensor_register(self, tensor: torch.Tensor, owning: bool = ...) -> None: ...
    def tensor_deregister(self) -> None: ...
    def put(
        self,
        tensor: torch.Tensor,
        dst_rank: int,
        target_offset_nelems: int,
        async_op: bool,
        opts: PutOptions = ...,
    ) -> Work: ...
    def map_remote_tensor(self, rank: int) -> torch.Tensor: ...
    def signal(self, peer_rank: int, async_op: bool, opts: SignalOptions = ...) -> Work: ...
    def wait_signal(
        self, peer_rank: int, async_op: bool, opts: WaitSignalOptions = ...
    ) -> Work: ...
    def get_attr(self, peer_rank: int) -> WindowAttr: ...

def set_nccl_wheel(path: str) -> None: ...
def _require_nccl_memory() -> None: ...
def _use_nccl(path: str) -> None: ...
def environment() -> list[EnvEntry]: ...
def unknown_variables() -> list[tuple[str, str]]: ...
def choose_interface(store_host: str) -> list[tuple[str, str]]: ...
def _log_to(file: str, level: int) -> None: ...
def _plan_cost(
    operation: str,
    hosts: list[int],
    bytes: int,
    element_bytes: int,
    wide_bytes: int,
    bandwidth: float,
    latency: float,
) -> tuple[dict[str, float], list[dict[str, float]]]: ...
def _open_shared_tensors() -> None: ...
def _close_shared_tensors() -> None: ...
def _is_shared_memory(address: int, bytes: int) -> bool: ...
def _shared_memory_usage() -> tuple[int, int]: ...
def usable_cores() -> int: ...
def dump_trace(path: str) -> str: ...
def _close_all(has_exception: bool) -> None: ...
def copy_streaming(destination: int, source: int, bytes: int) -> None: ...
