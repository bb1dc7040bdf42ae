"""A progress bar: on stderr, on rank 0, on a terminal, with rich if it is there."""

from __future__ import annotations

import importlib
import sys
from types import TracebackType
from typing import Any


class Progress:
    def __init__(self, total: int, show: bool) -> None:
        self._total = total
        self._done = 0
        self._bar: Any = None
        self._task: Any = None
        self._plain = False
        if not (show and sys.stderr.isatty()):
            return
        try:
            rich = importlib.import_module("rich.progress")
            console = importlib.import_module("rich.console").Console(stderr=True)
        except ImportError:
            self._plain = True
            return
        # Hidden while rows are printed: rich would wrap them to the width of the terminal.
        self._bar = rich.Progress(console=console, transient=True, redirect_stdout=False)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.hide()

    def hide(self) -> None:
        """Until the next begin()."""
        if self._bar is not None:
            self._bar.stop()

    def begin(self, what: str) -> None:
        """Names what is measured now; whatever was begun before is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=what)
            self._bar.start()
        elif self._plain:
            sys.stderr.write(f"[{self._done + 1}/{self._total}] {what}\n")
        self._done += 1
