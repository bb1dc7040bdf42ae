"""`mycoll faults`: kill, stop, cut off and misuse ranks, and time how the others notice.

The scenarios break processes, make network namespaces and need the test suite's worlds, so they are
part of a checkout (tests/faults) and not of the package; this finds them from there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"


def is_here() -> bool:
    """Returns whether this is a checkout."""
    return (TESTS / "faults").is_dir()


def main(words: Sequence[str]) -> int:
    """Becomes `python -m faults` with these words."""
    sys.stdout.flush()
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    os.execve(sys.executable, [sys.executable, "-m", "faults", *words], environment)
