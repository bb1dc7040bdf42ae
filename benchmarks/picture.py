"""Draws docs/all_reduce.svg, the picture in the README, from a recorded run of `mycoll bench`.

    python benchmarks/picture.py            # writes the picture
    python benchmarks/picture.py --check    # exit code 1 if the committed picture differs

Each pair of bars has its own scale: gloo's bar has the full width.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks/results/2026-11-22c-2core-vm-all_reduce.jsonl"
PICTURE = ROOT / "docs/all_reduce.svg"
SIZES = {4: "4 B", 256 << 10: "256 KiB", 64 << 20: "64 MiB"}

WIDTH, BAR, GAP = 760, 22, 18
LEFT, FULL = 160, 440  # the left end of bars, and the length of gloo's
COLOURS = {"gloo": "#9aa0a6", "mycoll": "#d4451d"}


def recorded() -> tuple[dict[str, Any], dict[tuple[int, str], dict[str, Any]]]:
    """The header of the run, and its results by size and backend."""
    header, *results = [json.loads(line) for line in RECORD.read_text().splitlines()]
    rows = {(row["size"], row["contender"]): row for row in results if row["size"] in SIZES}
    return header, rows


def duration(microseconds: float) -> str:
    if microseconds < 1000:
        return f"{microseconds:.0f} µs"
    return f"{microseconds / 1000:.1f} ms"


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{style}>{words}</text>'


def draw() -> str:
    header, rows = recorded()
    bold, small = ' font-weight="600"', ' font-size="12" fill="#5f6368"'
    lines = [text(20, 30, "Time of one all_reduce: shorter is better", bold)]
    y = 52
    for size, name in SIZES.items():
        lines.append(text(20, y + BAR + 6, name, bold))
        slowest = rows[size, "gloo"]["time_us"]
        for backend, colour in COLOURS.items():
            time = rows[size, backend]["time_us"]
            length = max(2.0, FULL * time / slowest)
            note = duration(time)
            if backend == "mycoll":
                note += f" ({rows[size, 'gloo']['ratio']:.2g} times as fast)"
            lines += [
                text(LEFT - 10, y + 16, backend, ' text-anchor="end"'),
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>',
                text(LEFT + length + 8, y + 16, note),
            ]
            y += BAR + 2
        y += GAP
    machine, versions = header["machine"], header["versions"]
    about = (
        f"{header['ranks']} ranks on {machine['usable_cores']} cores of a virtual machine "
        f"({machine['cpu']}), torch {versions['torch']}, {header['date'][:10]}."
    )
    scale = "Each pair has its own scale. A factor is the median over rounds measured side by side."
    lines += [text(20, y + 4, about, small), text(20, y + 22, scale, small)]
    height = y + 36
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="14" fill="#202124">'
    )
    back = f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, back, *lines, "</svg>", ""])


def main() -> int:
    picture = draw()
    if "--check" in sys.argv[1:]:
        return int(picture != PICTURE.read_text())
    PICTURE.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
