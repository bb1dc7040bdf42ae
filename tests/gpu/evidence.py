"""NCCL's warnings, in a file for each process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def nccl_log(folder: Path, stem: str = "nccl") -> Iterator[tuple[str, str]]:
    """Variables that make NCCL log to this folder, unless the user has set them."""
    if "NCCL_DEBUG_FILE" not in os.environ:
        yield "NCCL_DEBUG_FILE", str(folder / f"{stem}-%h-%p.log")
    if "NCCL_DEBUG" not in os.environ:
        yield "NCCL_DEBUG", "WARN"


def nccl_warnings(folder: Path, stem: str = "nccl", most: int = 3) -> list[str]:
    """The last warnings of each file."""
    found = []
    for file in sorted(folder.glob(f"{stem}-*.log")):
        lines = [line for line in file.read_text(errors="replace").splitlines() if "WARN" in line]
        found += [f"{file.name}: {line}" for line in lines[-most:]]
    return found


def drop_silent(folder: Path, stem: str = "nccl") -> None:
    """Removes the files without warnings."""
    for file in sorted(folder.glob(f"{stem}-*.log")):
        if "WARN" not in file.read_text(errors="replace"):
            file.unlink()
