"""mycoll.spawn: a function on several ranks of this machine, from a script or a notebook cell.

Each rank is a process of its own (start method "spawn": safe with threads, and for CUDA). The
parent holds the rendezvous store, collects the results of the ranks, and stops them all when one
fails. `mycoll bench` and `mycoll demo` start their ranks here, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

from mycoll import _leaving
from mycoll._terminal import is_unread

# How long others may take to report after the first failure: it may be the consequence of theirs.
GRACE_SECONDS = 1.0
TICK_SECONDS = 0.5

_PR_SET_PDEATHSIG = 1

T = TypeVar("T")


class SpawnError(RuntimeError):
    """A rank of `spawn()` failed. The message contains that rank's traceback.

    Attributes:
        rank: The rank that failed first.
        cause: Its exception, without the traceback.
    """

    def __init__(self, message: str, rank: int, cause: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.cause = cause


def spawn(
    fn: Callable[..., T],
    nprocs: int = 2,
    args: Sequence[Any] = (),
    *,
    backend: str = "mycoll",
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> list[T]:
    """Runs `fn(*args)` on ranks of this machine, each in a process of its own.

    The group is made before `fn` starts, and destroyed after it returns. In a script, put the call
    under `if __name__ == "__main__":`.

    Args:
        fn: The function; it calls the functions of torch.distributed. Functions defined in notebook
            cells need `pip install cloudpickle`.
        nprocs: The number of ranks.
        args: The positional arguments of `fn`.
        backend: The backend of the group.
        env: Variables to add to the environment of the ranks.
        timeout: Seconds for all ranks together; `None`: no limit.

    Returns:
        The results of the ranks, by rank.

    Raises:
        SpawnError: A rank failed. The other ranks were stopped.
        TimeoutError: A rank had no result in time. All ranks were stopped.
        ValueError: `nprocs` is below 1.
        RuntimeError: `fn` cannot be sent to the ranks.

    Example:
        ranks = mycoll.spawn(dist.get_rank, nprocs=2, timeout=60)  # [0, 1]
    """
    __tracebackhide__ = True  # pytest shows the caller, and the rank's own traceback
    return _spawn(fn, nprocs, args, backend, env or {}, timeout)


def run_command(
    name: str, fn: Callable[..., int | None], nprocs: int, args: Sequence[Any], backend: str
) -> int:
    """Runs a command on ranks that share the cores: one thread each, unless OMP_NUM_THREADS is set.

    Args:
        name: The command, for messages.
        fn: Called with `args` on each rank; returns the rank's exit code.
        nprocs: The number of ranks.
        args: The arguments of `fn`.
        backend: The backend of the group that the ranks have when `fn` starts.

    Returns:
        The largest exit code of the ranks; 1 if one fails, after printing its error.

    Raises:
        BrokenPipeError: The reader of standard output has gone away.
    """
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        codes = _spawn(fn, nprocs, args, backend, env, None, is_command=True)
    except SpawnError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return max(code or 0 for code in codes)


# --- in the parent --------------------------------------------------------------------------------


def _spawn(
    fn: Callable[..., T],
    nprocs: int,
    args: Sequence[Any],
    backend: str,
    env: Mapping[str, str],
    timeout: float | None,
    is_command: bool = False,
) -> list[T]:
    __tracebackhide__ = True
    if nprocs < 1:
        raise ValueError(f"nprocs must be at least 1, not {nprocs}")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "mycoll.spawn was called while a rank imports your script again; "
            'put the call under `if __name__ == "__main__":`'
        )
    import torch.distributed as dist

    payload = _pack((fn, tuple(args)), fn)
    # Held by the parent: if rank 0 fails early, the others must still be notified.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ranks: list[_Rank] = []
    try:
        for rank in range(nprocs):
            receiver, sender = context.Pipe(duplex=False)
            call = partial(_call, rank, nprocs, store.port, backend, payload)
            words = (call, os.getpid(), sender)
            process = context.Process(target=_run, args=words, name=f"mycoll rank {rank}")
            with _starting, _environment(env), _without_phantom_script():
                process.start()
            sender.close()  # now only the child holds it: its death is an end of file
            ranks.append(_Rank(rank, process, receiver))
        _collect(ranks, timeout, is_command)
        if failures := {each.number: each.failure for each in ranks if each.failure is not None}:
            first = min(failures, key=lambda n: (failures[n].is_consequence, failures[n].when))
            failure = failures[first]
            text = failure.cause if is_command and failure.is_of_system else failure.text.rstrip()
            message = f"rank {first} of {nprocs} failed:\n\n{text}"
            if others := ", ".join(str(rank) for rank in failures if rank != first):
                message += f"\n\nAfter it failed: rank {others}."
            raise SpawnError(message, first, failure.cause)
        return [pickle.loads(each.result) for each in ranks]
    finally:
        _stop(ranks)


@dataclass
class _Failure:
    text: str
    when: float  # on the clock that all processes of the machine share
    is_consequence: bool  # it reports that another rank is in trouble
    cause: str  # the text without the traceback
    is_of_system: bool = False  # an OSError, as of a full disk


@dataclass
class _Rank:
    number: int
    process: SpawnProcess
    receiver: Connection
    result: bytes = b""
    failure: _Failure | None = None
    is_done: bool = False

    def receive(self) -> None:
        """Takes the report of the rank, or notices that it has ended without one."""
        self.is_done = True
        try:
            if not self.process.is_alive() and not self.receiver.poll():
                raise EOFError
            self.result, self.failure = self.receiver.recv()
        except (EOFError, OSError):
            self.process.join(10)
            code = self.process.exitcode
            text = _describe_end(code)
            # A signal is the cause, also where others have noticed the end before this process.
            when = 0.0 if code is not None and code < 0 else time.monotonic()
            self.failure = _Failure(text, when, False, text)


def _collect(ranks: list[_Rank], timeout: float | None, is_command: bool) -> None:
    """Waits until all are done, or one has failed and the others have had GRACE_SECONDS."""
    __tracebackhide__ = True
    end = time.monotonic() + timeout if timeout is not None else None
    is_grace = False
    while waiting := [each for each in ranks if not each.is_done]:
        left = math.inf if end is None else max(0.0, end - time.monotonic())
        ready = wait([each.receiver for each in waiting], min(left, TICK_SECONDS))
        if is_command and is_unread():
            raise BrokenPipeError
        for each in waiting:
            # A process that it has forked may hold its end of the pipe: then nothing comes.
            if each.receiver in ready or not each.process.is_alive():
                each.receive()
        if not is_grace and any(each.failure for each in ranks):
            is_grace, end = True, time.monotonic() + GRACE_SECONDS
        elif left == 0 and not ready:
            if not is_grace:
                numbers = ", ".join(str(each.number) for each in waiting)
                raise TimeoutError(f"no result after {timeout:g} s from rank {numbers}; stopped")
            return


def _describe_end(code: int | None) -> str:
    if code is not None and code < 0:
        known = -code in set(signal.Signals)
        name = signal.Signals(-code).name if known else f"signal {-code}"
        hint = " (killed: perhaps the machine ran out of memory)" if name == "SIGKILL" else ""
        return f"The process was ended by {name}{hint}."
    return f"The process ended with exit code {code} and without a result; see its output."


def _stop(ranks: list[_Rank]) -> None:
    for each in ranks:
        if not each.is_done or each.failure is not None:
            each.process.kill()
    for each in ranks:
        each.process.join(10)
        if each.process.is_alive():  # returned a result, but does not end
            each.process.kill()
            each.process.join()
        each.receiver.close()


_starting = threading.Lock()  # the environment is the whole process's


@contextlib.contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """For a rank to inherit: modules that it imports before it receives its job may read it."""
    before = {name: os.environ[name] for name in more if name in os.environ}
    try:
        os.environ.update(more)
        yield
    finally:
        for name in more:
            os.environ.pop(name, None)
        os.environ.update(before)


def _has_script() -> bool:
    """Whether a rank can import what `__main__` is here."""
    main = sys.modules["__main__"]
    has_spec = getattr(main, "__spec__", None) is not None
    return has_spec or Path(getattr(main, "__file__", None) or "<none>").exists()


@contextlib.contextmanager
def _without_phantom_script() -> Iterator[None]:
    """`python -` says that __main__ is the file <stdin>; multiprocessing would try to run that."""
    names = vars(sys.modules["__main__"])
    phantom = names.pop("__file__", None) if not _has_script() else None
    try:
        yield
    finally:
        if phantom is not None:
            names["__file__"] = phantom


def _pack(content: Any, fn: Callable[..., Any], what: str = "") -> bytes:
    __tracebackhide__ = True
    problem = "it is defined in a notebook cell or at a prompt, where ranks cannot import it from"
    if _has_script() or getattr(fn, "__module__", "") != "__main__":
        try:
            return pickle.dumps(content)
        except Exception as error:
            problem = f"it cannot be pickled ({error})"
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise RuntimeError(
            f"spawn cannot send {what}{getattr(fn, '__qualname__', fn)}: {problem}. "
            "Do: pip install cloudpickle, or move the function into a file and import it"
        ) from None
    return bytes(cloudpickle.dumps(content))


# --- in a rank ------------------------------------------------------------------------------------


def _run(call: Callable[[], bytes], parent: int, sender: Connection) -> None:
    # A rank does not outlive its parent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended already
        raise SystemExit(128 + signal.SIGTERM)
    try:
        result = call()
    except BaseException as error:
        when = time.monotonic()
        error.__traceback__ = _below_this_file(error.__traceback__)
        text = "".join(traceback.format_exception(error))
        cause = "".join(traceback.format_exception_only(error)).strip()
        with contextlib.suppress(OSError):  # the parent has been interrupted, too
            kinds = _is_consequence(error), cause, isinstance(error, OSError)
            sender.send((b"", _Failure(text, when, *kinds)))
        sender.close()
        _leaving.close_all(_leaving.ended_by(error))  # the others' errors then name the reason
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(1)
    sender.send((result, None))
    sender.close()


def _call(rank: int, nprocs: int, port: int, backend: str, payload: bytes) -> bytes:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(nprocs)
    import torch
    import torch.distributed as dist

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // nprocs))
    fn, args = pickle.loads(payload)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=nprocs)
    result = _pack(fn(*args), fn, "the result of ")
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _below_this_file(trace: Any) -> Any:
    """The part of a traceback that begins in the user's function."""
    step = trace
    while step is not None and step.tb_frame.f_code.co_filename == __file__:
        step = step.tb_next
    return step or trace


def _is_consequence(error: BaseException | None) -> bool:
    """Whether it comes from a failed collective: then another rank is likely to know the cause."""
    from torch.distributed import DistError

    seen: list[BaseException] = []  # `raise error from error` makes a circle
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return any(isinstance(each, DistError) for each in seen)
