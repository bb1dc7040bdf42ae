"""The server that ranks are forked from: multiprocessing's, with torch imported. The processes of
pytest-xdist and the programs that they start share one server, because each would take seconds to
import torch."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from typing import Any

PRELOAD = ["worlds.preload"]
SHARED = "WORLDS_FORK_SERVER"  # a variable: environment, process and address of the server to use
FAMILIES = ("MYCOLL", "STANDIN", "GLOO", "NCCL", "TORCH", "CUDA", "LD_", "PYTHON")


def environment() -> str:
    """A hash of the variables that matter to ranks: another environment needs another server."""
    variables = {name: os.environ[name] for name in os.environ if name.startswith(FAMILIES)}
    path = variables.pop("PYTHONPATH", "")
    variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path.split(os.pathsep)))
    return hashlib.sha256(repr(sorted(variables.items())).encode()).hexdigest()


def context() -> ForkServerContext:
    """The context whose processes are forked from the server and inherit its environment."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOAD)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    theirs, _, shared = os.environ.get(SHARED, "").partition(":")
    if theirs == environment() and server._forkserver_address is None:
        pid, _, address = shared.partition(":")
        server._forkserver_pid = int(pid)
        server._forkserver_address = address
        # The server ends with the process that started it, not with this one.
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        server.ensure_running = resource_tracker.ensure_running
    return found


def share() -> None:
    """Starts a server for this process and for all processes that it starts."""
    if sys.version_info >= (3, 14):  # its servers need a key that is not in the environment
        return
    context()
    forkserver.ensure_running()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    os.environ[SHARED] = f"{environment()}:{server._forkserver_pid}:{server._forkserver_address}"


def pid() -> int:
    """The process id of the server, which is the parent of the ranks."""
    context()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server.ensure_running()
    return int(server._forkserver_pid)
