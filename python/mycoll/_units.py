"""Sizes, durations and other numbers on the command line: how they are read and shown."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)

_MOST = 10**6
_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def show_size(size: float) -> str:
    """Bytes, as in "64 KiB"."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.4g} {unit}"
    return f"{size:.0f} B"


def show_seconds(value: float) -> str:
    """A duration, as in "3.2 ms"."""
    if value < 1e-3:
        return f"{max(0.0, value) * 1e6:.0f} us"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 100:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 6000 else f"{value / 3600:.1f} h"


def show_microseconds(value: float) -> str:
    """A number of microseconds without the unit, for the columns of a table: "3.20"."""
    return f"{value:.{2 if value < 100 else 1 if value < 10000 else 0}f}"


def parse_size(text: str) -> int:
    """Bytes from `8`, `64K`, `1.5M`, `1G` (powers of 1024, as in nccl-tests)."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?b)?\s*", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 8, 64K, 1M or 1G")
    size = float(match[1]) * (1 << _SHIFTS[match[2].lower()])
    if size >= 1 << 63:
        raise argparse.ArgumentTypeError(f"'{text}' is more than any memory holds")
    return int(size)


def at_least(low: Number) -> Callable[[str], Number]:
    """Returns a parser of numbers, whole ones if `low` is: not NaN, and not infinite."""
    kind = type(low)

    def parse(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"'{text}' is not {what}") from None
        if not low <= value <= _MOST:
            most = "" if value < low else f", and at most {_MOST:g}"
            raise argparse.ArgumentTypeError(f"must be at least {low:g}{most}")
        return value

    return parse


seconds = at_least(0.1)
