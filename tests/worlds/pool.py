"""Parent side: starts worlds, runs jobs in them, and handles their failures.

Workers are forked from one server process that has imported torch, so that starting a world takes a
fraction of a second. A world that fails in any way is killed and made anew for the next test.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing.connection as mpc
import os
import pickle
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worlds import servers, worker

RANK_PREFIX = re.compile(r"\[rank\d+\]:\[\w+ [\d:.]+ ")  # of torch's log lines
# torch looks up the name of 127.0.0.1 at each connection to a TCPStore. A name server that loses
# some of these thousands of queries must not delay each by 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@dataclass(frozen=True)
class Spec:
    """The properties of a world; tests with equal specs may share one."""

    size: int
    transport: str = ""  # "shm", "tcp", or "" if the backend has only one
    backend: str = "mycoll"  # the string given to init_process_group
    init: bool = True  # False: jobs make their own process groups
    env: tuple[tuple[str, str], ...] = ()
    device: str = ""  # device and path: see worlds.device
    path: str = ""
    timeout: float = 45.0  # of the process group; below the deadline, so that its error is shown

    @property
    def label(self) -> str:
        where = f"{self.device}-{self.path}" if self.device else self.transport
        return f"{self.size}x{where or self.backend}"


# In the shared worlds of one process of the test run.
MOST_RANKS = 16


@dataclass
class Options:
    """Options of the whole test run."""

    backend: str = "mycoll"
    deadline: float = 60.0
    native_stacks: bool = False


class WorldFailure(AssertionError):
    """A job failed on at least one rank; the text has the errors, and the stacks of other ranks."""


@dataclass
class Member:
    rank: int
    process: Any
    conn: mpc.Connection
    log: Path
    log_start: int = 0  # of the job
    log_seen: int = 0  # of the output between the previous job and this one
    outcome: tuple[str, Any] | None = None  # ("ok", value) | ("error", text) | ("gone", text)

    def case(self) -> str:
        path = Path(f"{self.log}.case")
        return path.read_text(errors="replace").strip() if path.exists() else ""

    def log_tail(self, *, since_last_job: bool = False, limit: int = 6000) -> str:
        start = self.log_seen if since_last_job else self.log_start
        data = self.log.read_bytes()[start:]
        return data[-limit:].decode(errors="replace").strip()


class World:
    """Ranks of one process group, waiting for jobs."""

    _ids = itertools.count()

    def __init__(self, spec: Spec, options: Options, store_port: int) -> None:
        self.spec = spec
        self.size = spec.size
        self.transport = spec.transport
        self.backend = spec.backend
        self.options = options
        self.broken = False
        self._dir = tempfile.TemporaryDirectory(prefix="world-")
        name = f"{os.getpid()}-{next(self._ids)}"
        context = servers.context()
        self.members: list[Member] = []
        for rank in range(spec.size):
            ours, theirs = context.Pipe()
            log = Path(self._dir.name) / f"rank{rank}.log"
            log.touch()
            setup = worker.Setup(
                rank=rank,
                size=spec.size,
                transport=spec.transport,
                backend=spec.backend,
                family=options.backend,
                init=spec.init,
                env=dict(spec.env),
                timeout=spec.timeout,
                store_port=store_port,
                world_name=name,
                log=str(log),
                device=spec.device,
                path=spec.path,
            )
            process = context.Process(target=worker.main, args=(theirs, setup), daemon=True)
            process.start()
            theirs.close()
            self.members.append(Member(rank, process, ours, log))
        self._collect("start of the world", options.deadline)

    @property
    def pids(self) -> list[int]:
        return [m.process.pid for m in self.members]

    def run(self, job: Callable[..., Any], *args: Any, deadline: float | None = None) -> list[Any]:
        """Runs job(ctx, *args) on every rank; returns the results by rank."""
        __tracebackhide__ = True
        self.start(job, *args)
        return self.finish(deadline)

    def run_in_group(self, job: Callable[..., Any], *args: Any, timeout: float = 45.0) -> list[Any]:
        """run(), in a new default group that the job may break; the processes are reused."""
        __tracebackhide__ = True
        return self.run(worker.in_new_group, job, timeout, *args)

    def start(self, job: Callable[..., Any], *args: Any) -> None:
        """The first half of run(), for tests that act on the ranks meanwhile."""
        assert not self.broken, "this world has failed before"
        self._what = f"{job.__module__}.{job.__qualname__}{args!r:.200}"
        message = pickle.dumps((job.__module__, job.__qualname__, args))
        for m in self.members:
            m.outcome = None
            m.log_start = m.log.stat().st_size
            with contextlib.suppress(OSError):
                m.conn.send_bytes(message)

    def finish(self, deadline: float | None = None, *, allow_gone: bool = False) -> list[Any]:
        __tracebackhide__ = True
        return self._collect(self._what, deadline or self.options.deadline, allow_gone)

    def close(self) -> list[int | None]:
        """Lets the workers exit; returns their exit codes."""
        for m in self.members:
            m.conn.close()
        end = time.monotonic() + 10
        for m in self.members:
            m.process.join(max(0.0, end - time.monotonic()))
        codes = [m.process.exitcode for m in self.members]
        self.kill()
        return codes

    def kill(self) -> None:
        self.broken = True
        for m in self.members:
            if m.process.is_alive():
                m.process.kill()
            m.process.join(5)
            m.conn.close()
        with contextlib.suppress(OSError):
            self._dir.cleanup()

    def _collect(self, what: str, deadline: float, allow_gone: bool = False) -> list[Any]:
        __tracebackhide__ = True
        try:
            return self._collect_by(what, deadline, allow_gone)
        except BaseException:  # also pytest's own: no other test may wait for these workers
            self.kill()
            raise

    def _collect_by(self, what: str, deadline: float, allow_gone: bool) -> list[Any]:
        __tracebackhide__ = True
        started = time.monotonic()
        end = started + deadline
        while waiting := [m for m in self.members if m.outcome is None]:
            left = end - time.monotonic()
            if left <= 0:
                break
            ready = mpc.wait(
                [m.conn for m in waiting] + [m.process.sentinel for m in waiting], left
            )
            for m in waiting:
                if m.conn in ready or m.process.sentinel in ready:
                    m.outcome = self._receive(m)
                    if m.outcome[0] != "ok" and not (allow_gone and m.outcome[0] == "gone"):
                        # The other ranks probably wait for it, so do not wait for them for long.
                        end = min(end, time.monotonic() + 5)
        if all(
            m.outcome and (m.outcome[0] == "ok" or (allow_gone and m.outcome[0] == "gone"))
            for m in self.members
        ):
            for m in self.members:
                m.log_seen = m.log.stat().st_size
            return [m.outcome[1] if m.outcome[0] == "ok" else None for m in self.members]
        raise WorldFailure(self._report(what, time.monotonic() - started))

    def _receive(self, m: Member) -> tuple[str, Any]:
        try:
            return pickle.loads(m.conn.recv_bytes())
        except (EOFError, OSError):
            m.process.join(30)  # on a busy machine the exit code may take seconds
            code = m.process.exitcode
            name = signal.Signals(-code).name if code is not None and code < 0 else f"code {code}"
            return "gone", f"the process ended with {name}"

    def _report(self, what: str, seconds: float) -> str:
        silent = [m for m in self.members if m.outcome is None]
        for m in silent:
            with contextlib.suppress(OSError):
                os.kill(m.process.pid, signal.SIGUSR1)  # faulthandler writes all stacks to the log
        if silent:
            time.sleep(0.5)
        texts: dict[str, list[int]] = {}
        for m in self.members:
            kind, value = m.outcome or ("silent", "no answer; its stacks are below")
            text = "finished" if kind == "ok" else str(value)
            if kind in ("gone", "silent"):
                output = m.log_tail(since_last_job=True)  # a rank may also end between two jobs
                text += f"\n--- in case: {m.case()}\n--- its output\n{output}"
            text = RANK_PREFIX.sub("", text)
            if kind == "silent" and self.options.native_stacks:
                text += f"\n--- native stacks\n{native_stacks(m.process.pid)}"
            texts.setdefault(text, []).append(m.rank)
        parts = [f"world {self.spec.label}: {what} failed after {seconds:.1f} s"]
        parts += [f"=== rank {','.join(map(str, ranks))}: {text}" for text, ranks in texts.items()]
        return "\n".join(parts)


def native_stacks(pid: int) -> str:
    command = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all bt 30"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout[-8000:]
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"gdb: {error}"


@dataclass
class Pool:
    """All worlds of a test run."""

    options: Options
    worlds: dict[Spec, World] = field(default_factory=dict)
    _store: Any = None

    def spec(self, size: int, transport: str = "", **changes: Any) -> Spec:
        spec = Spec(size=size, transport=transport, backend=self.options.backend)
        return replace(spec, **changes)

    def get(self, spec: Spec) -> World:
        """A shared world, which is made if there is none or if it has failed."""
        world = self.worlds.pop(spec, None)
        if world is None or world.broken:
            self._make_room(spec.size)
            world = self.fresh(spec)
        self.worlds[spec] = world  # last, as the most recently used one
        return world

    def _make_room(self, ranks: int) -> None:
        """A rank takes up to half a GiB, so the least recently used worlds are closed."""
        kept = [world for world in self.worlds.values() if not world.broken]
        while kept and ranks + sum(world.size for world in kept) > MOST_RANKS:
            kept.pop(0).close()
        self.worlds = {world.spec: world for world in kept}

    def fresh(self, spec: Spec) -> World:
        """A world that is not shared; the caller closes or kills it."""
        return World(spec, self.options, self.store_port)

    @property
    def store_port(self) -> int:
        """The port of a store in this process, which outlives every worker."""
        if self._store is None:
            from torch.distributed import TCPStore

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store.port

    def close(self) -> None:
        for world in self.worlds.values():
            if not world.broken:
                for m in world.members:  # so that all exit at the same time
                    m.conn.close()
        end = time.monotonic() + 5
        for world in self.worlds.values():
            for m in world.members:
                m.process.join(max(0.0, end - time.monotonic()))
            world.kill()
