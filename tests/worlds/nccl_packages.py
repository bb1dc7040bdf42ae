"""Finds NVIDIA's packages and their versions."""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def packages() -> list[Path]:
    """The folders that contain nvidia/nccl."""
    places = [Path(sysconfig.get_path("purelib")), *(ROOT / "build/nccl").glob("*")]
    if given := os.environ.get("NCCL_PACKAGES"):
        places.insert(0, Path(given))
    return [place for place in places if (place / "nvidia/nccl/include/nccl.h").is_file()]


def version_of(place: Path) -> str:
    text = (place / "nvidia/nccl/include/nccl.h").read_text()
    parts = [
        re.search(rf"^#define NCCL_{part} (\d+)$", text, re.M)
        for part in ["MAJOR", "MINOR", "PATCH"]
    ]
    return ".".join(match[1] if match else "?" for match in parts)
