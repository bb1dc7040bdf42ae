"""Worlds whose tensors are on a device, and jobs for CPU tensors that run on a device.

A device is "standin" (tests/standins) or "cuda". A path is the way in which tensors are
transferred: "nccl", "host" (staging and the CPU engine), and, for several ranks on one GPU, two
ways to make NCCL accept that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# The environment of rank {rank} for each path.
PATHS: dict[str, dict[str, str]] = {
    "nccl": {"MYCOLL_CUDA": "nccl"},
    "host": {"MYCOLL_CUDA": "host"},
    "auto": {"MYCOLL_CUDA": "auto"},  # on the stand-in without NCCL, the ranks agree on host
    "nccl-auto": {"MYCOLL_CUDA": "auto"},  # with NCCL: nccl, unless ranks agree on host
    # Several ranks on one GPU: NCCL sees several hosts, each with its own GPU.
    "nccl-hosts": {
        "MYCOLL_CUDA": "nccl",
        "NCCL_HOSTID": "rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_MAX_CTAS": "2",
    },
    # The same with an option of NCCL 2.30.3 and later.
    "nccl-shared": {
        "MYCOLL_CUDA": "nccl",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": "4",
    },
}


def standins() -> Path | None:
    from standins import accelerator

    return accelerator.folder()


def missing(device: str, path: str) -> str:
    """Why this path cannot be used here; empty if it can."""
    if device == "cuda":
        if not torch.cuda.is_available():
            return "no GPU that torch can use"
        if path == "nccl-shared" and nccl_version() < 23003:
            return "an NCCL older than 2.30.3 does not let ranks share a GPU"
    elif standins() is None:
        return "the stand-ins are not built; ./dev builds them"
    elif path.startswith("nccl") and not (standins() / "libnccl.so.2").exists():
        return "the stand-in for NCCL is not built"
    elif path == "auto" and torch_has_nccl():
        return "mycoll would use torch's own NCCL for the stand-in device"
    return ""


def paths(device: str, size: int, wanted: Sequence[str]) -> list[str]:
    """The wanted paths. If ranks share a GPU, "nccl" becomes the two paths that allow it."""
    if device != "cuda" or size <= torch.cuda.device_count():
        return list(wanted)
    found = []
    for path in wanted:
        found += ["nccl-hosts", "nccl-shared"] if path == "nccl" else [path]
    return found


def nccl_version() -> int:
    """The version of the NCCL that torch calls, which LD_PRELOAD may have replaced; 0 if none."""
    from mycoll import doctor

    if not torch.distributed.is_nccl_available():
        return 0
    major, minor, patch = doctor.nccl_version()
    return major * 10000 + minor * 100 + patch


def environment(device: str, path: str, rank: int) -> dict[str, str]:
    values = {name: value.format(rank=rank) for name, value in PATHS[path].items()}
    if device == "standin" and path.startswith("nccl") and not torch_has_nccl():
        values["MYCOLL_NCCL_LIBRARY"] = str(standins() / "libnccl.so.2")
    return values


def torch_has_nccl() -> bool:
    """Whether torch has its own NCCL, which mycoll then uses instead of another one."""
    return torch.distributed.is_nccl_available()


def rehearse() -> None:
    """Loads the kernels of the stand-in for CUDA, if this is `./dev gpu --rehearse`."""
    from standins import cuda

    if cuda.is_here():
        cuda.load()


def is_scripted(device: str) -> bool:
    """Whether ranks use the stand-in for NCCL, which STANDIN_NCCL can script."""
    from standins import cuda

    return cuda.is_here() if device == "cuda" else not torch_has_nccl()


def nccl(device: str) -> ctypes.CDLL:
    """The library that this process's groups call."""
    return ctypes.CDLL("libnccl.so.2" if device == "cuda" else str(standins() / "libnccl.so.2"))


def script_nccl(script: str) -> None:
    """Replaces the script of the stand-in in this process, which STANDIN_NCCL sets at the start."""
    ctypes.CDLL(str(standins() / "libnccl.so.2")).mycoll_standin_nccl_script(script.encode())


def count_nccl(what: str) -> int:
    """How often this process has called a function of the stand-in, or another of its counters."""
    count = ctypes.CDLL(str(standins() / "libnccl.so.2")).mycoll_standin_nccl_count
    count.restype = ctypes.c_int64
    return int(count(what.encode()))


def break_device(sentence: str) -> None:
    """From now on, queries of events and streams of this process return this error; empty: none."""
    ctypes.CDLL(None).mycoll_standin_break(sentence.encode())


def start(device: str, path: str, rank: int) -> torch.device:
    """Registers the device with torch and mycoll, and makes the rank's device current."""
    if device == "standin":
        from standins import accelerator

        if path.startswith("nccl") and torch_has_nccl():
            from mycoll import _C

            _C._use_nccl(str(standins() / "libnccl.so.2"))

        accelerator.load()
        accelerator.serve("mycoll")
    else:
        rehearse()
    mine = torch.device(device, rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(mine.index)
    return mine


# --- jobs written for CPU tensors


class Mirror:
    """Copies of CPU tensors on the device; tensors that share memory share it there, too."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self(each) for each in value)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._storages or storage.nbytes() == 0:
            ours = torch.empty(0, dtype=torch.uint8).set_(storage)
            theirs = torch.empty(len(ours), dtype=torch.uint8, device=self.device)
            # Pinned, so that the copy may still be in progress when the operation is called.
            theirs.copy_(ours.pin_memory(), non_blocking=True)
            self._storages[key] = ours, theirs
        storage = self._storages[key][1].untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device=self.device)
        return view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def back(self) -> None:
        """Copies the tensors back from the device, on the current stream."""
        for ours, theirs in self._storages.values():
            ours.copy_(theirs)


class MirroredWork:
    def __init__(self, work: dist.Work, mirror: Mirror) -> None:
        self._work, self._mirror = work, mirror

    def wait(self, *args: Any) -> bool:
        done = self._work.wait(*args)
        self._mirror.back()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def mirrored(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The collective, called with copies of its arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        mirror = Mirror(device)
        result = function(*mirror(args), **{name: mirror(value) for name, value in kwargs.items()})
        if isinstance(result, dist.Work):
            return MirroredWork(result, mirror)
        mirror.back()
        return result

    return call


def mirrored_batch(device: torch.device) -> Callable[[Sequence[dist.P2POp]], list[MirroredWork]]:
    original = dist.batch_isend_irecv

    def call(ops: Sequence[dist.P2POp]) -> list[MirroredWork]:
        mirror = Mirror(device)
        for op in ops:
            op.tensor = mirror(op.tensor)
        return [MirroredWork(work, mirror) for work in original(ops)]

    return call


COLLECTIVES = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "all_reduce_coalesced",
    "all_gather_coalesced",
    "send",
    "recv",
    "isend",
    "irecv",
]


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """In this block, collectives called as `dist.all_reduce` and so on work on the device.

    The block may use a work only by waiting for it, and an output only after that.
    """
    real = dist.P2POp

    def p2p_op(op: Callable[..., Any], *args: Any, **kwargs: Any) -> dist.P2POp:
        return real(getattr(op, "__wrapped__", op), *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            function = mirrored(getattr(dist, name), device)
            stack.enter_context(mock.patch.object(dist, name, function))
        batch = mirrored_batch(device)
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", batch))
        stack.enter_context(mock.patch.object(dist, "P2POp", p2p_op))
        yield


# --- streams and graphs


@contextlib.contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Blocks the stream in this block; on CUDA for about a quarter of a second."""
    if stream.device.type == "cuda":
        # ExternalStream would make a new stream for the default stream, whose handle is 0.
        numbers = {
            name: getattr(stream, name) for name in ("stream_id", "device_index", "device_type")
        }
        with torch.cuda.stream(torch.cuda.Stream(**numbers)):
            torch.cuda._sleep(400_000_000)
        yield
        return
    from standins import accelerator

    with accelerator.held(stream):
        yield


def graph_on(device: torch.device) -> Any:
    """An object with capture(), which is a context manager, replay() and reset()."""
    if device.type == "cuda":
        return CudaGraph()
    from standins import accelerator

    return accelerator.Graph()


class CudaGraph:
    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.graph(self._graph)

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()
