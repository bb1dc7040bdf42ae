"""`mycoll bench`: measures and verifies collectives of any torch.distributed backend.

How to read its output, and how it measures, is in benchmarks/README.md.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit code is 0 only if nothing wrong was computed."""
    from mycoll.bench.cli import main as run

    return run(argv)
