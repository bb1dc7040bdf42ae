"""A free port for a program that will listen on it, as torch's store does."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """Reserves the port while the block runs, because the system may otherwise assign it to another
    connection. SO_REUSEADDR, which stores also set, lets the program listen on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
