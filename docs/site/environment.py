"""Writes docs/environment.md from the table of variables in csrc/base/env.cpp.

./dev python docs/site/environment.py
"""

from __future__ import annotations

from pathlib import Path

from mycoll._native import native

PAGE = Path(__file__).resolve().parents[1] / "environment.md"


def environment_page() -> str:
    """The text of the page; a test holds the file against this."""
    lines = [
        "# Environment variables",
        "",
        "Read when a process makes its first group, and kept. `mycoll env` shows the values in",
        "force. Written by `docs/site/environment.py` from the table in `csrc/base/env.cpp`.",
        "",
        "| Variable | Default | Meaning |",
        "|---|---|---|",
    ]
    for entry in native().environment():
        default = f"`{entry['default']}`" if entry["default"] else ""
        lines.append(f"| `{entry['name']}` | {default} | {' '.join(entry['help'].split())} |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(environment_page() + "\n")
