"""Runs a job in a world while the test observes it."""

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
    """Starts a job, and returns the future of its results."""
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(1)
    return pool.submit(world.run, job, *args)
