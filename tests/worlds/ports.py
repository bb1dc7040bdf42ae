"""A port that a program is about to listen at, as torch's store does."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """Held for as long as the block runs, or else the system may give it to any connection before
    the program listens there. SO_REUSEADDR, which stores set too, lets the program have it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
