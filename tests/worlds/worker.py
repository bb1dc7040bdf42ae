"""Child side: a rank that runs jobs, and `Ctx`, the first argument of a job."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import hashlib
import importlib
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from worlds import arith, gloo_gaps, nccl_gaps

PR_SET_PDEATHSIG = 1
MAX_SHOWN = 12
CASE_BYTES = 300
TESTS = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True)
class Setup:
    rank: int
    size: int
    transport: str
    backend: str
    family: str  # the implementation under test: "mycoll" or "gloo"
    init: bool
    env: dict[str, str]
    timeout: float
    store_port: int
    world_name: str
    log: str
    device: str = ""  # "standin", "cuda"; empty: CPU tensors only
    path: str = ""  # of the device's tensors, see worlds.device


@dataclass
class Ctx:
    """A rank's view of the world, which also collects the failures of a job with many cases."""

    setup: Setup
    case_fd: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    jobs: int = 0  # the number of jobs that this world has started
    failures: list[str] = field(default_factory=list)
    _case: str = ""
    _digest: Any = field(default_factory=hashlib.sha256)

    @property
    def rank(self) -> int:
        return self.setup.rank

    @property
    def size(self) -> int:
        return self.setup.size

    @property
    def backend(self) -> str:
        return self.setup.backend

    @property
    def gloo(self) -> bool:
        return self.setup.family == "gloo"

    @property
    def is_on_cpu(self) -> bool:
        return not self.setup.device

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.setup.timeout)

    # --- process groups

    def store(self, name: str = "") -> dist.Store:
        """A connection to the store of the test run, with a prefix that a job's ranks share."""
        tcp = dist.TCPStore("127.0.0.1", self.setup.store_port, is_master=False)
        return dist.PrefixStore(f"{self.setup.world_name}/{self.jobs}/{name}", tcp)

    def init(self, name: str = "", **kwargs: Any) -> None:
        kwargs.setdefault("backend", self.backend)
        kwargs.setdefault("timeout", self.timeout)
        dist.init_process_group(
            store=self.store(name), rank=self.rank, world_size=self.size, **kwargs
        )

    # --- inputs

    def inputs(self, dtype: torch.dtype, shape: Any, seed: int = 0) -> list[torch.Tensor]:
        """The inputs of all ranks, in rank order; each rank can compute all of them."""
        return [arith.values(dtype, shape, seed * 1009 + r) for r in range(self.size)]

    def random(self, seed: Any) -> random.Random:
        """A generator with the same numbers on all ranks."""
        return random.Random(repr(seed))

    # --- cases

    def skips(self, name: str) -> bool:
        """Whether the implementation under test does not support this case."""
        if self.setup.path.startswith("nccl"):
            return nccl_gaps.skips(name)
        return self.gloo and gloo_gaps.reason(name) is not None

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Names a block. An exception in it is recorded, and the job continues."""
        outer, self._case = self._case, name
        self._show_case()
        try:
            yield
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error}".strip()[:1500]
            self.fail(f"{text}\n      at {where.filename}:{where.lineno}: {where.line}")
        finally:
            self._case = outer
            self._show_case()

    def _show_case(self) -> None:
        """Writes the name of the case to a file, where the parent finds it if the rank hangs."""
        text = self._case[: CASE_BYTES - 1].encode()[:CASE_BYTES].ljust(CASE_BYTES)
        os.pwrite(self.case_fd, text, 0)

    def fail(self, text: str) -> None:
        text = f"{self._case}: {text}" if self._case else text
        self.failures.append(text)
        print("failed:", text, file=sys.stderr, flush=True)
        if len(self.failures) == 200:
            raise RuntimeError("200 failures: giving up")

    def same(self, got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
        """Compares shape, dtype and bits (any NaN equals any NaN). Floating-point results of other
        libraries are compared approximately, because they may add in another order."""
        foreign = self.gloo or self.setup.path.startswith("nccl")
        exact = not (foreign and (want.is_floating_point() or want.is_complex()))
        got, want = got.cpu(), want.cpu()  # through the current stream
        difference = arith.difference(got, want, exact)
        if difference:
            self.fail(f"{what} {difference}".strip())

    def equal(self, got: Any, want: Any, what: str = "") -> None:
        if got != want:
            self.fail(f"{what} got {got!r}, want {want!r}".strip())

    @contextlib.contextmanager
    def raises(
        self, kinds: type[BaseException] | tuple[type[BaseException], ...], *texts: str
    ) -> Iterator[None]:
        """Checks that the block raises one of these, with all these texts in its message."""
        try:
            yield
        except kinds as error:
            message = str(error)
            for text in texts:
                if text.lower() not in message.lower():
                    self.fail(f"{type(error).__name__} does not contain {text!r}: {message[:1000]}")
        except Exception as error:
            self.fail(f"raised {type(error).__name__} instead of {kinds}: {str(error)[:1000]}")
        else:
            self.fail(f"raised nothing instead of {kinds}")

    def digest(self, tensor: torch.Tensor) -> None:
        """Adds the bits of a result to this rank's digest; see digests()."""
        self._digest.update(arith.raw(tensor.cpu()).numpy().tobytes())

    def digests(self) -> str:
        return self._digest.hexdigest()

    def end_of_job(self) -> None:
        failures, self.failures = self.failures, []
        self._digest = hashlib.sha256()
        if failures:
            shown = "\n  - ".join(failures[:MAX_SHOWN])
            raise CasesFailed(f"{len(failures)} cases failed:\n  - {shown}")


def stable_seed(*parts: Any) -> int:
    """A number that is the same in every process for the same parts, unlike hash()."""
    return zlib.crc32(repr(parts).encode())


def called(mode: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calls a collective synchronously or asynchronously, and waits for it."""
    if mode == "async":
        work = function(*args, async_op=True, **kwargs)
        if work is not None:
            work.wait()
    else:
        function(*args, **kwargs)


OURS = r"(__main__|mycoll|test_\w+|worlds|jobs|faults|gpu|standins)(\..*)?$"


def filter_warnings() -> None:
    """Makes warnings of mycoll's code and of the tests errors, and ignores torch's own."""
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", module=OURS)
    # These deprecate names for which the oldest supported torch has no replacement.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    # Tests send tensors of all types and layouts.
    warnings.filterwarnings("ignore", "B?Complex.* support is experimental")
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
    warnings.filterwarnings("ignore", "torch.quantize_per_tensor.* are deprecated")


def main(conn: Connection, setup: Setup) -> None:
    os.setpgid(0, 0)  # only the parent handles Ctrl-C of the test run
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(setup.log, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(setup.env)
    if setup.device:
        from worlds import device

        os.environ.update(device.environment(setup.device, setup.path, setup.rank))
    dist.set_debug_level_from_env()  # torch has read the server's environment
    if setup.family == "mycoll" and setup.transport:
        os.environ["MYCOLL_TRANSPORT"] = setup.transport
        if setup.transport == "tcp" and setup.size % 2:  # unless the test sets these variables
            secret = Path(setup.log + ".secret")
            secret.write_text("a secret of this test run")
            os.environ.setdefault("MYCOLL_SECRET_FILE", str(secret))
            os.environ.setdefault("MYCOLL_ENCRYPT", "1")
    torch.set_num_threads(1)
    filter_warnings()
    ctx = Ctx(setup, os.open(setup.log + ".case", os.O_RDWR | os.O_CREAT, 0o600))

    def start() -> None:
        if setup.family == "mycoll":
            importlib.import_module("mycoll")
        if setup.device:
            from worlds import device

            ctx.device = device.start(setup.device, setup.path, setup.rank)
        if setup.init:
            ctx.init()

    answer(conn, start)
    while True:
        try:
            module, name, args = pickle.loads(conn.recv_bytes())
        except (EOFError, OSError):
            break

        def job(module: str = module, name: str = name, args: tuple[Any, ...] = args) -> Any:
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            ctx.jobs += 1
            try:
                result = function(ctx, *args)
            finally:
                if not setup.init:
                    leave_group()
                ctx.end_of_job()
            return result

        answer(conn, job)
    leave_group()
    write_coverage()


def in_new_group(ctx: Ctx, job: Callable[..., Any], timeout: float, *args: Any) -> Any:
    """Runs a job in a new default group, for worlds without one. A short timeout is set only after
    init, which may take long on a busy machine."""
    if timeout >= ctx.setup.timeout:
        ctx.setup = replace(ctx.setup, timeout=timeout)
        ctx.init()
    else:
        ctx.init()
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), dist.group.WORLD)
        ctx.setup = replace(ctx.setup, timeout=timeout)
    return job(ctx, *args)


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def write_coverage() -> None:
    """Called after each job, because a world may be killed, and multiprocessing exits by
    _exit()."""
    native = sys.modules.get("mycoll._C")
    if hasattr(native, "_write_coverage"):
        native._write_coverage()


class CasesFailed(AssertionError):
    """An error whose text is complete without a traceback."""


def explained(error: BaseException) -> str:
    """The traceback without torch's frames."""
    if isinstance(error, CasesFailed):
        return str(error)
    trace = traceback.TracebackException.from_exception(error)
    last = trace.stack[-1:] if trace.stack else []
    frames = [f for f in trace.stack if TESTS in f.filename and f.name not in ("answer", "job")]
    trace.stack = traceback.StackSummary.from_list([*frames, *(f for f in last if f not in frames)])
    return "".join(trace.format()).strip()


def answer(conn: Connection, job: Callable[[], Any]) -> None:
    reply: tuple[str, Any]
    try:
        reply = ("ok", job())
    except BaseException as error:
        reply = ("error", explained(error))
    sys.stdout.flush()
    sys.stderr.flush()
    write_coverage()
    try:
        data = pickle.dumps(reply)
    except Exception:
        data = pickle.dumps(("error", "the result cannot be pickled:\n" + traceback.format_exc()))
    conn.send_bytes(data)
