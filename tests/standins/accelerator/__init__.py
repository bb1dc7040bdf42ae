"""The stand-in device as torch's accelerator "standin": call load(), then use torch.standin and
`device="standin"`.

In addition to what every accelerator has (torch.accelerator, torch.Stream, torch.Event), for tests:

    held()          a context manager that blocks a stream
    sleep()         blocks a stream for some time
    set_delay()     delays every task of every stream by a random time
    Graph           capture and replay
    counts()        memory in use, and calls of record_stream
    verify()        aborts the process if freed memory was written to
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

NAME = "standin"
_native: Any = None


def folder() -> Path | None:
    """The folder of the stand-ins in the build; None if they are not built."""
    tests = os.environ.get("CPP_TEST_DIR")
    path = Path(tests).parent / "standins" if tests else None
    return path if path and path.is_dir() else None


def load() -> types.ModuleType:
    """Makes "standin" a device of this process; idempotent."""
    global _native
    if _native is not None:
        return torch.standin
    where = folder()
    if where is None:
        raise RuntimeError("the stand-ins are not built; ./dev builds them and sets CPP_TEST_DIR")
    # RTLD_GLOBAL: the stand-in for NCCL finds the device by name.
    ctypes.CDLL(str(where / "libmycoll_standin_device.so"), ctypes.RTLD_GLOBAL)
    if torch.version.cuda is None:
        ctypes.CDLL(str(where / "libmycoll_standin_cudart.so"), ctypes.RTLD_GLOBAL)
    torch.utils.rename_privateuse1_backend(NAME)
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    spec = importlib.util.spec_from_file_location("_standin", where / f"_standin{suffix}")
    assert spec and spec.loader
    _native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_native)
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()
    atexit.register(_native.verify)
    return torch.standin


def serve(backend: str) -> None:
    """Groups that are made with the backend's name alone also use it for tensors of the device."""
    import torch.distributed as dist

    served = dist.Backend.backend_capability[backend]
    if NAME not in served:
        served.append(NAME)


# --- functions that torch expects in the module of each device

Stream = torch.Stream
Event = torch.Event


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return _native.device_count()


def current_device() -> int:
    return _native.current_device()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(index_of(device))


def index_of(device: Any) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(index_of(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before, device = current_stream(stream.device), current_device()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)
        set_device(device)


def synchronize(device: Any = None) -> None:
    _native.synchronize(index_of(device))


def manual_seed(seed: int) -> None:
    _native.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _native.default_generator(index).manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _native.default_generator(index_of(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _native.default_generator(index_of(device)).set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


# --- for tests


def _numbers(stream: torch.Stream | None) -> tuple[int, int]:
    stream = stream or current_stream()
    return stream.stream_id, stream.device_index


@contextlib.contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[None]:
    """The stream runs nothing until the block is left."""
    gate = _native.gate_close(*_numbers(stream))
    try:
        yield
    finally:
        _native.gate_open(gate)


def sleep(microseconds: int, stream: torch.Stream | None = None) -> None:
    _native.sleep(*_numbers(stream), microseconds)


def set_delay(microseconds: int) -> None:
    _native.set_delay(microseconds)


def priority(stream: torch.Stream) -> int:
    return _native.priority(*_numbers(stream))


def is_capturing(stream: torch.Stream | None = None) -> bool:
    return _native.is_capturing(*_numbers(stream))


def counts() -> dict[str, int]:
    return _native.counts()


def verify() -> None:
    _native.verify()


def race() -> None:
    """Makes a data race, which the thread sanitizer must report."""
    _native.race()


def abort_work(work: Any) -> None:
    """Calls Work::abort(), which torch does not bind to Python."""
    _native.abort_work(work)


def throw_after(work: Any) -> None:
    """Adds a C++ callback that throws when the Work's future completes."""
    _native.throw_after(work)


def wrap_cpu_allocator() -> None:
    """Permanently replaces torch's allocator of CPU tensors with one that forwards to it."""
    _native.wrap_cpu_allocator()


def sequence_of(work: Any) -> int:
    """Work::getSequencenumber(), which torch does not bind to Python."""
    return _native.sequence_of(work)


def completion_key(work: Any) -> int:
    """Work::getCompletionKey(), which torch does not bind to Python."""
    return _native.completion_key(work)


def count_completions(backend: Any, hook: int) -> Callable[[], tuple[dict[int, int], int]]:
    """Registers a completion hook. Returns a function that returns how often each Work (by its key)
    has completed so far, and how many of these completions had a duration."""
    return _native.count_completions(backend, hook)


class Graph:
    """Records the work that a block enqueues on a stream and on streams that join it.

    graph = Graph()
    with graph.capture():
        x.add_(1)
    graph.replay()
    """

    def __init__(self) -> None:
        self._graph = 0

    @contextlib.contextmanager
    def capture(self, stream: torch.Stream | None = None) -> Iterator[None]:
        stream = stream or torch.Stream(device=NAME)
        numbers = _numbers(stream)
        stream.wait_stream(current_stream())
        before = current_stream()
        torch.accelerator.set_stream(stream)
        _native.capture_begin(*numbers)
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):
                _native.graph_destroy(_native.capture_end(*numbers))
            raise
        else:
            self._graph = _native.capture_end(*numbers)
        finally:
            torch.accelerator.set_stream(before)

    def replay(self) -> None:
        _native.graph_launch(self._graph, *_numbers(None))

    def reset(self) -> None:
        if self._graph:
            _native.graph_destroy(self._graph)
            self._graph = 0

    def __del__(self) -> None:
        self.reset()
