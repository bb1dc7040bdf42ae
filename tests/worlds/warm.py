"""Programs in processes that are forked from one that has imported torch: they begin after a few
milliseconds, not after seconds. What torch's import does for mycoll happens in the new process,
with its environment. A test of the import itself starts a real interpreter instead.

    program = warm.start("import torch; print(torch.ones(1))", environment={...})
    assert program.communicate(timeout=60) == ("tensor([1.])\\n", "") and program.returncode == 0
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIMIT = 1 << 20  # bytes of a request
SHARED = "WORLDS_WARM_SERVER"  # a variable: the address of the server to use
OPTIMIZERS = (
    "torch._dynamo",
)  # what the first step of any optimizer imports, for a second or more


class Program:
    """As far as tests need it, what subprocess.Popen is."""

    def __init__(self, status: int, files: list[int]) -> None:
        self._status = status
        self._files = files  # what it writes, in memory
        self.pid = int(os.read(status, 20))
        self.returncode: int | None = None

    def communicate(self, timeout: float) -> tuple[str, str]:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked program", timeout)
            self.returncode = int(os.read(self._status, 20))
        written = (os.pread(fd, os.fstat(fd).st_size, 0) for fd in self._files)
        out, error = (data.decode(errors="replace") for data in written)
        return out, error

    def __del__(self) -> None:
        for fd in (self._status, *self._files):
            os.close(fd)

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


@functools.cache
def server(*preload: str) -> socket.socket:
    """For requests to a server. preload: what it imports besides torch."""
    requests = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LIMIT)
    shared = None if preload else os.environ.get(SHARED)
    requests.connect(abstract(shared or launch(*preload)))
    atexit.register(requests.close)
    return requests


def share() -> None:
    """Starts the server without `preload` for this process and for all that it will start."""
    os.environ[SHARED] = launch()


def launch(*preload: str) -> str:
    """Starts a server, which ends when this process does; its address."""
    address = "@" + "-".join(("worlds", str(os.getpid()), *preload))
    alive, ours = os.pipe()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MYCOLL", "PYTHONPATH"))}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as theirs:
        theirs.bind(abstract(address))
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), str(alive), *preload],
            env={**kept, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            pass_fds=[theirs.fileno(), alive],
        )
    os.close(alive)
    atexit.register(end, ours, process)
    return address


def abstract(address: str) -> str:
    """As the kernel has it. A variable cannot contain its first character."""
    return address.replace("@", "\0", 1)


def end(ours: int, process: subprocess.Popen[bytes]) -> None:
    """Ends a server, which leaves when the other end of its pipe is closed."""
    os.close(ours)
    process.wait(10)


def start(
    code: str | Path,
    *arguments: str,
    environment: dict[str, str] | None = None,
    folder: str | Path | None = None,
    to_the_end: bool = False,
    preload: Sequence[str] = (),
) -> Program:
    """Runs code, or the file of this path, as Python's -c or the file would be run. To the end:
    also what comes after the handlers of atexit, for tests of how processes end. preload: modules
    that it finds imported, as OPTIMIZERS for programs that train."""
    files = [os.memfd_create(name) for name in ("out", "error")]
    for fd in files:  # else processes that share it may overwrite what another has just written
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    status, theirs = os.pipe()
    request = pickle.dumps(
        {
            "code": code.read_text() if isinstance(code, Path) else code,
            "name": str(code) if isinstance(code, Path) else "-c",
            "arguments": arguments,
            "environment": dict(os.environ if environment is None else environment),
            "folder": str(folder or Path.cwd()),
            "to_the_end": to_the_end,
        }
    )
    socket.send_fds(server(*preload), [request], [*files, theirs])
    os.close(theirs)
    return Program(status, files)


def module(name: str) -> str:
    """The code of `python -m name`; arguments follow."""
    return f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"


def run_module(
    name: str, *arguments: str, environment: dict[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    program = start(module(name), *arguments, environment=environment)
    try:
        out, error = program.communicate(timeout)
    finally:
        program.kill()
    return subprocess.CompletedProcess((name, *arguments), program.returncode or 0, out, error)


def ranks(
    code: str | Path,
    count: int,
    *arguments: str,
    environment: dict[str, str] | None = None,
    timeout: float = 120,
    **more: Any,
) -> list[tuple[int, str, str]]:
    """The program on so many ranks, as torchrun would start it: exit code, output and errors of
    each."""
    from worlds.ports import free_port  # here: the server, which is this file, has no `worlds`

    base = {"OMP_NUM_THREADS": "1", **(os.environ if environment is None else environment)}
    base |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    started: list[Program] = []
    with free_port() as port:
        base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            for rank in range(count):
                mine = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                started.append(start(code, *arguments, environment=mine, **more))
            outputs = [program.communicate(timeout) for program in started]
        finally:
            for program in started:
                program.kill()
    codes = [program.returncode for program in started]
    return [(code or 0, *each) for code, each in zip(codes, outputs, strict=True)]


# --- in the server --------------------------------------------------------------------------------


def serve(requests: socket.socket, alive: int, preload: Sequence[str]) -> dict[str, Any]:
    """Returns in each new process, with what to run; ends with the process of the tests."""
    for name in ("torch", *preload):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # each program would look at all of it, and so copy its pages
    gc.set_threshold(20_000, 20, 20)
    while True:
        ready, _, _ = select.select([requests, alive], [], [])
        with contextlib.suppress(ChildProcessError):  # their times count as this process's, so
            while os.waitpid(-1, os.WNOHANG)[0]:  # that `time` sees them
                pass
        if alive in ready:
            os._exit(0)
        data, fds, _, _ = socket.recv_fds(requests, LIMIT, 3)
        if os.fork() == 0:
            requests.close()
            os.close(alive)
            return watched(pickle.loads(data), *fds)
        for fd in fds:
            os.close(fd)


def watched(request: dict[str, Any], out: int, error: int, status: int) -> dict[str, Any]:
    """Stays behind to say how the program ends, and returns in the program."""
    program = os.fork()
    if program:
        os.write(status, f"{program:<20}".encode())
        _, how = os.waitpid(program, 0)
        os.write(status, f"{os.waitstatus_to_exitcode(how):<20}".encode())
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(error, 2)
    for fd in (out, error, status):
        os.close(fd)
    return request


def become(request: dict[str, Any]) -> types.ModuleType:
    """Makes this process what a new interpreter would be once it has imported torch."""
    torch = sys.modules["torch"]
    environment = request["environment"]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(request["folder"])
    sys.argv = [request["name"], *request["arguments"]]
    first = "" if request["name"] == "-c" else str(Path(request["name"]).parent)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = [first, *paths]
    torch.distributed.set_debug_level_from_env()
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    if torch._is_device_backend_autoload_enabled():
        torch._import_device_backends()
    main = types.ModuleType("__main__")
    if request["name"] != "-c":
        main.__file__ = request["name"]
    sys.modules["__main__"] = main
    return main


def run(code: Any, main: types.ModuleType) -> int:
    """The exit code. What comes after that takes longest in a forked process: the ends of all of
    torch's modules, whose memory has to be copied for it. It is left out."""
    status = 0
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    request = serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:])
    main = become(request)
    code = compile(request["code"], request["name"], "exec")
    if not request["to_the_end"]:
        os._exit(run(code, main))
    exec(code, main.__dict__)
