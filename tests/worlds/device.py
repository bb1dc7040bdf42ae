"""Worlds whose tensors are on a device: how a rank gets one, and how jobs written for CPU tensors
run on it.

A device is "standin" (tests/standins) or "cuda"; a path is the way that tensors take: "nccl",
"host" (staging and the CPU engine), and on one GPU for several ranks the two ways by which NCCL can
be made to serve them.
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

# What a path needs in the environment of rank {rank}.
PATHS: dict[str, dict[str, str]] = {
    "nccl": {"MYCOLL_CUDA": "nccl"},
    "host": {"MYCOLL_CUDA": "host"},
    "auto": {"MYCOLL_CUDA": "auto"},  # on the stand-in, which has no NCCL then: host, by agreement
    "nccl-auto": {"MYCOLL_CUDA": "auto"},  # with NCCL: nccl, unless ranks agree on host
    # Several ranks on one GPU: NCCL believes in several hosts, each with the GPU to itself.
    "nccl-hosts": {
        "MYCOLL_CUDA": "nccl",
        "NCCL_HOSTID": "rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_MAX_CTAS": "2",
    },
    # The same by permission, which NCCL 2.30.3 and later can give.
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
    """Why this path cannot be taken here; empty where it can."""
    if device == "cuda":
        if not torch.cuda.is_available():
            return "no GPU that torch can use"
        if path == "nccl-shared" and nccl_version() < 23003:
            return "an NCCL older than 2.30.3 does not let ranks share a GPU"
    elif standins() is None:
        return "the stand-ins are not built; ./dev builds them"
    elif path.startswith("nccl") and not (standins() / "libnccl.so.2").exists():
        return "the stand-in for NCCL is not built"
    elif path == "auto" and brings_nccl():
        return "torch's own NCCL would be taken for the stand-in device"
    return ""


def paths(device: str, size: int, wanted: Sequence[str]) -> list[str]:
    """The wanted ones; where ranks share a GPU, by the two ways of making NCCL accept that."""
    if device != "cuda" or size <= torch.cuda.device_count():
        return list(wanted)
    found = []
    for path in wanted:
        found += ["nccl-hosts", "nccl-shared"] if path == "nccl" else [path]
    return found


def nccl_version() -> int:
    """Of the library that torch calls, which LD_PRELOAD may have replaced; 0 where it has none."""
    from mycoll import doctor

    if not torch.distributed.is_nccl_available():
        return 0
    major, minor, patch = doctor.nccl_version()
    return major * 10000 + minor * 100 + patch


def environment(device: str, path: str, rank: int) -> dict[str, str]:
    values = {name: value.format(rank=rank) for name, value in PATHS[path].items()}
    if device == "standin" and path.startswith("nccl") and not brings_nccl():
        values["MYCOLL_NCCL_LIBRARY"] = str(standins() / "libnccl.so.2")
    return values


def brings_nccl() -> bool:
    """Whether torch has loaded an NCCL of its own, beside which no other would be taken."""
    return torch.distributed.is_nccl_available()


def rehearse() -> None:
    """Where torch's CUDA is on stand-ins: `./dev gpu --rehearse`."""
    from standins import cuda

    if cuda.is_here():
        cuda.load()


def is_scripted(device: str) -> bool:
    """Whether ranks find no NCCL but the stand-in, which STANDIN_NCCL tells what to do."""
    from standins import cuda

    return cuda.is_here() if device == "cuda" else not brings_nccl()


def nccl(device: str) -> ctypes.CDLL:
    """The library that this process's groups call."""
    return ctypes.CDLL("libnccl.so.2" if device == "cuda" else str(standins() / "libnccl.so.2"))


def tell_nccl(script: str) -> None:
    """From here on the stand-in does this, in this process (as STANDIN_NCCL, which says it from the
    start)."""
    ctypes.CDLL(str(standins() / "libnccl.so.2")).mycoll_standin_nccl_script(script.encode())


def count_nccl(what: str) -> int:
    """How often the stand-in's function was called in this process, or what else it counts."""
    count = ctypes.CDLL(str(standins() / "libnccl.so.2")).mycoll_standin_nccl_count
    count.restype = ctypes.c_int64
    return int(count(what.encode()))


def break_device(sentence: str) -> None:
    """From here on the stand-in answers with this error to whoever asks for an event or a stream of
    this process; empty: no more."""
    ctypes.CDLL(None).mycoll_standin_break(sentence.encode())


def start(device: str, path: str, rank: int) -> torch.device:
    """Makes the device known to torch and mycoll, and a rank's own one the current one."""
    if device == "standin":
        from standins import accelerator

        if path.startswith("nccl") and brings_nccl():
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
            # Pinned, so that the copy is still on its way when the operation is called.
            theirs.copy_(ours.pin_memory(), non_blocking=True)
            self._storages[key] = ours, theirs
        storage = self._storages[key][1].untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device=self.device)
        return view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def back(self) -> None:
        """What the device holds now, by way of the current stream."""
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
    """The collective, on copies of its arguments."""

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
    """In this block, what is called as `dist.all_reduce` and so on works on the device.

    Not for blocks that keep tensors or works in other ways than by waiting for them.
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


# --- what tests of streams need


@contextlib.contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """The stream stands still in this block; on CUDA for about a quarter of a second."""
    if stream.device.type == "cuda":
        # Not ExternalStream: for the default stream, whose handle is 0, that makes a new one.
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
    """An object with capture(), a block, and replay()."""
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
