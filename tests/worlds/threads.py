"""Ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def on_all(body: Callable[[int], Any], count: int) -> list[Any]:
    """Runs body(rank) in a thread for each rank, and returns the results."""
    results: list[Any] = [None] * count
    failures: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    if failures:
        raise failures[0]
    return results
