"""Output for people, shared by the commands: tables, colour, progress, errors, how they end."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import select
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NoReturn

_COLOURS = {"red": 31, "green": 32, "yellow": 33, "bold": 1, "dim": 2}


def width() -> int:
    """Columns that a table may take: the terminal's, 80 where there is none."""
    return max(60, min(100, shutil.get_terminal_size().columns))


def is_terminal(stream: IO[str] | None) -> bool:
    """Returns whether a stream is a terminal that moves its cursor."""
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


def note(text: str) -> None:
    """Prints a remark among the results of a command."""
    for line in wrapped(text, 2):
        print(paint(f"# {line}", "yellow"), flush=True)


def columns(cells: Sequence[str], sizes: Sequence[int]) -> str:
    """One line of a table, with a space between cells.

    Args:
        cells: The texts.
        sizes: The least width of each cell; a negative one aligns to the right.
    """
    return " ".join(
        f"{text:{'<' if n >= 0 else '>'}{abs(n)}}" for text, n in zip(cells, sizes)
    ).rstrip()


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a table whose first row has the headings.

    Columns without a value are left out. If a cell of the last column is too long for the width,
    the cells of that column are on lines of their own.
    """
    keep = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    last = keep[-1]
    sizes = [1 + max(len(row[i]) for row in rows) for i in keep]
    room = width() - sum(sizes[:-1]) - len(sizes[:-1])
    if all(len(row[last]) <= room for row in rows):
        return [columns([row[i] for i in keep], sizes) for row in rows]
    short = [columns([row[i] for i in keep[:-1]], sizes) for row in rows]
    below: list[list[str]] = [[], *(folded(" " * 6 + row[last]) for row in rows[1:])]
    return [line for first, more in zip(short, below) for line in [first, *more]]


def folded(sentence: str) -> list[str]:
    """The lines of a sentence. Its own indentation stays, and further lines have four more."""
    indent = " " * (len(sentence) - len(sentence.lstrip()))
    return textwrap.wrap(sentence, width(), initial_indent="", subsequent_indent=f"{indent}    ")


class Progress:
    """The current step, in one line of stderr that is rewritten in place; only on a terminal."""

    def __init__(self, is_wanted: bool = True) -> None:
        self._is_shown = is_wanted and is_terminal(sys.stderr)

    def show(self, text: str) -> None:
        """Shows the step in the place of the one before."""
        if self._is_shown:
            sys.stderr.write(f"\r\x1b[K{text[: width() - 1]}")
            sys.stderr.flush()

    def hide(self) -> None:
        """Before anything else is written."""
        self.show("")


class Parser(argparse.ArgumentParser):
    """Prints what is wrong first, and then the usage of the command."""

    def error(self, message: str) -> NoReturn:
        text = "\n  ".join(wrapped(f"{self.prog}: {message}", 2))
        hint = f"`{self.prog} --help` explains the options."
        self.exit(2, f"{text}\n{self.format_usage()}{hint}\n")


# --- how a command ends -------------------------------------------------------------------------

# The exit code that a shell shows for a program that the signal has ended.
UNREAD = 128 + signal.SIGPIPE
INTERRUPTED = 128 + signal.SIGINT
FAILED = 2


def quietly(run: Callable[[], int]) -> int:
    """Runs a command; returns its exit code, without a traceback when the reader of its output goes
    away (as of `mycoll env | head -1`), the disk is full, mycoll does not load, or after Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names are in any language
    try:
        try:
            return run()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        silence()
        return UNREAD
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, ImportError) as error:
        print(f"mycoll: {error}", file=sys.stderr)
        silence()
        return FAILED


def silence() -> None:
    """Discards what is written to standard output from now on, and what Python has buffered."""
    # Without a descriptor: there is none, or it is a notebook's or a test's.
    with contextlib.suppress(OSError, AttributeError), Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def is_unread() -> bool:
    """Returns whether standard output is a pipe whose reader is gone."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
