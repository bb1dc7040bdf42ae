"""The results: a table for people, and JSON lines for programs."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from mycoll._terminal import FAILED, columns, paint
from mycoll._units import show_microseconds, show_size
from mycoll.bench.options import Options
from mycoll.bench.plot import undrawable
from mycoll.bench.result import Row

# The columns of the table; the fifth is a gap.
_SIZES = (-10, -9, -9, -8, 0, 12, 0)


def table_header(row: Row, subject: str) -> str:
    """The lines above the first row of an operation, dtype and redop."""
    kind = "" if row.op == "barrier" else f", {row.type}"
    kind += "" if row.redop == "none" else f" {row.redop}"
    third = "CPU us" if "cpu_us" in row.extra else "p99 us"
    names = ("size", "time us", third, "bus GB/s", "", "contender", f"time beside {subject}'s")
    return f"\n# {row.op}{kind}, {row.ranks} ranks\n#{columns(names, _SIZES)[1:]}"


def table_line(row: Row) -> str:
    """The line of a row."""
    times = [show_microseconds(each) for each in (row.time_us, row.extra.get("cpu_us", row.p99_us))]
    cells = (show_size(row.size), *times, f"{row.busbw:.2f}", "", row.contender, ratio(row))
    wrong = "  " + paint(f"{row.wrong} WRONG", "red") if row.wrong else ""
    return columns(cells, _SIZES) + wrong


def ratio(row: Row) -> str:
    """How much slower or faster than the first backend, with the interval where there is one."""
    if row.ratio is None:
        return ""
    value, low, high = row.ratio, row.ratio_low, row.ratio_high
    word = "slower"
    if value < 1:
        value, word = 1 / value, "faster"
        low, high = (None if bound is None else 1 / bound for bound in (high, low))
    text = f"{_number(value)}x {word}"
    return text if low is None or high is None else f"{text} [{_number(low)}, {_number(high)}]"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def unwritable(path: str) -> str:
    """Why no file can be written there; '' where one can."""
    file = Path(os.path.realpath(path))
    place = file if file.exists() else file.parent
    is_good = os.access(place, os.W_OK) and not file.is_dir() and not file.is_symlink()
    return "" if is_good else f"{path} is a directory, or no file can be written there"


def wrong_files(options: Options) -> str:
    """Why rank 0 cannot write its files; '' if it can."""
    if options.plot and (reason := undrawable(options.plot)):
        return f"--plot: {reason}"
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path and (reason := unwritable(path)):
            return f"--{name}: {reason}"
    return ""


def misused(how: str, is_shown: bool = True) -> int:
    """Prints what is wrong with the command line, on one of the ranks; returns the exit code."""
    if is_shown:
        print(f"mycoll bench: {how}", file=sys.stderr)
    return FAILED


_FIELDS = {field.name for field in dataclasses.fields(Row)}


def read_results(path: str) -> tuple[dict[str, object], list[Row]]:
    """The header and the rows of a JSON lines file; ValueError says what is wrong with it."""
    header: dict[str, object] = {}
    rows: list[Row] = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            kind = record.pop("kind")
            if kind == "header":
                header = record
            elif kind == "result":
                # Files of earlier versions have fields that are gone.
                rows.append(Row(**{name: record[name] for name in record.keys() & _FIELDS}))
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise ValueError(f"{path}:{number} is not a row of `mycoll bench`: {cause}") from cause
    if not header:
        raise ValueError(f"{path} has no header row: not written by `mycoll bench --json`")
    return header, rows
