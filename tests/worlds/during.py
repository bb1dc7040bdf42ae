"""Asks about a world while a job runs in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 10.0  # seconds


def eventually(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (result := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert result
    return result


def during(world: Any, job: Any, *args: Any) -> Any:
    """Starts a job, and returns what waits for its end."""
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(1)
    return pool.submit(world.run, job, *args)
