"""What the commands share when they write for people: width, colour, progress, bad arguments."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from typing import IO, NoReturn

_COLOURS = {"red": 31, "green": 32, "yellow": 33, "bold": 1, "dim": 2}


def width() -> int:
    """Columns that a table may take: the terminal's, 80 where there is none."""
    return max(60, min(100, shutil.get_terminal_size().columns))


def is_terminal(stream: IO[str] | None) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str) -> str:
    """For stdout: in colour on a terminal, unless NO_COLOR is set."""
    if not is_terminal(sys.stdout) or "NO_COLOR" in os.environ:
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def wrapped(text: str, indent: int) -> list[str]:
    """Lines that fit the width behind an indentation, which they do not carry. Words stay whole:
    a path or a command that is longer than a line can still be copied."""
    columns = max(40, width() - indent)
    lines: list[str] = []
    for line in text.splitlines():
        lines += textwrap.wrap(line, columns, break_long_words=False, break_on_hyphens=False)
    return lines or [""]


class Progress:
    """What is being done, in one line of stderr that is rewritten in place; only on a terminal."""

    def __init__(self, is_wanted: bool = True) -> None:
        self._is_shown = is_wanted and is_terminal(sys.stderr)

    def show(self, text: str) -> None:
        if self._is_shown:
            sys.stderr.write(f"\r\x1b[K{text[: width() - 1]}")
            sys.stderr.flush()

    def hide(self) -> None:
        """Before anything else is written."""
        self.show("")


class Parser(argparse.ArgumentParser):
    """Says what is wrong first, and then how the command is used."""

    def error(self, message: str) -> NoReturn:
        usage = self.format_usage()
        hint = f"`{self.prog} --help` explains the options.\n"
        self.exit(2, f"{self.prog}: {message}\n{usage}{hint}")
