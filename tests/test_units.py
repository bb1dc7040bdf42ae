"""Numbers on the command line, and --help."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest
from mycoll import _terminal, _units

HELP = """
import contextlib, io, sys
from mycoll import __main__
for verb in ["", "bench compare", *__main__.known_verbs()]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        __main__.main([*verb.split(), "--help"])
    assert out.getvalue().startswith(f"usage: mycoll {verb}".strip()), out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80, verb
    assert "torch" not in sys.modules, verb
"""


def test_help_needs_no_torch() -> None:
    """torch takes seconds to import."""
    done = subprocess.run(
        [sys.executable, "-c", HELP],
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 us"), (2e-5, "20 us"), (0.0123, "12.3 ms"), (5, "5.0 s"), (9e3, "2.5 h")],
)
def test_durations(value: float, text: str) -> None:
    assert _units.show_seconds(value) == text


@pytest.mark.parametrize("text", ["nan", "inf", "0", "-1", "x", "1e9"])
def test_seconds_that_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        _units.seconds(text)


@pytest.mark.parametrize("size", [0, 8, 4096, 3 << 19, 1 << 30])
def test_sizes_that_are_shown_can_be_read(size: int) -> None:
    assert _units.parse_size(_units.show_size(size)) == size


def test_a_table_without_empty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_terminal, "width", lambda: 60)
    rows = [("rank", "state", "call"), ("0", "", "all_reduce"), ("10", "", "barrier")]
    assert _terminal.table(rows) == ["rank  call", "0     all_reduce", "10    barrier"]
