"""Programs in processes that are forked from one that has imported torch, so that they start in
milliseconds instead of seconds. What importing torch does for mycoll happens in the new process,
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
OPTIMIZERS = ("torch._dynamo",)  # the first step of an optimizer imports it, which takes a second


class Program:
    """The part of subprocess.Popen that tests need."""

    def __init__(self, status: int, files: list[int]) -> None:
        self._status = status
        self._files = files  # its output, in memory
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
    """A socket for requests to a server. preload: modules that it imports besides torch."""
    requests = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LIMIT)
    shared = None if preload else os.environ.get(SHARED)
    requests.connect(abstract(shared or launch(*preload)))
    atexit.register(requests.close)
    return requests


def share() -> None:
    """Starts the server without `preload` for this process and for all processes that it starts."""
    os.environ[SHARED] = launch()


def launch(*preload: str) -> str:
    """Starts a server, which ends with this process, and returns its address."""
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
    """The kernel's form of the address, which an environment variable cannot contain."""
    return address.replace("@", "\0", 1)


def end(ours: int, process: subprocess.Popen[bytes]) -> None:
    """Ends a server by closing the other end of its pipe."""
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
    """Runs code like `python -c`, or the file of this path like `python FILE`.

    to_the_end: also runs what Python does after the handlers of atexit, for tests of how processes
    end. preload: modules that are already imported, such as OPTIMIZERS for programs that train."""
    files = [os.memfd_create(name) for name in ("out", "error")]
    for fd in files:  # else processes that share it may overwrite each other's output
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
    """The code that runs a module like `python -m name`."""
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
    """Runs the program on `count` ranks as torchrun would. Returns the exit code, the output and
    the errors of each."""
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
    """Returns the request in each new process; ends with the process of the tests."""
    for name in ("torch", *preload):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the collector would copy these pages in each program
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
    """Forks the program, in which it returns. The parent reports how the program ends."""
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
    """Makes this process look like a new interpreter that has imported torch."""
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
    """Runs the program and returns its exit code. Omits the destruction of torch's modules, which
    takes long in a forked process because it copies their memory."""
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
