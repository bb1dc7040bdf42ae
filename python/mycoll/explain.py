"""`mycoll explain`: prints what docs/errors.md says about a family of errors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from mycoll import _terminal

# A wheel has the page in the package.
PAGES = (
    Path(__file__).with_name("errors.md"),
    Path(__file__).resolve().parents[2] / "docs/errors.md",
)


def sections() -> dict[str, tuple[int, str]]:
    """By anchor: the level of each heading of the page, and its text down to the next heading of
    this level or a higher one."""
    page = next(page for page in PAGES if page.exists()).read_text()
    headings = list(re.finditer(r"^(##+) (.+)$", page, re.M))
    found = {}
    for index, heading in enumerate(headings):
        level = len(heading[1])
        later = (each.start() for each in headings[index + 1 :] if len(each[1]) <= level)
        anchor = re.sub(r"[^\w -]", "", heading[2].lower()).replace(" ", "-")
        found[anchor] = level, page[heading.start() : next(later, len(page))].strip()
    return found


def main(words: Sequence[str]) -> int:
    """Runs `mycoll explain`."""
    parser = _terminal.Parser(
        prog="mycoll explain",
        description="The cause of an error, and what to do. An error names its family in its last "
        "line.",
    )
    parser.add_argument("family", nargs="?", help="such as different-collectives; none: list them")
    family = parser.parse_args(words).family
    known = sections()
    if family is None:
        for anchor, (level, _) in known.items():
            print("  " * (level - 2) + anchor)
        return 0
    if family not in known:
        near = difflib.get_close_matches(family, known, 1)
        hint = f"did you mean {near[0]}?" if near else "`mycoll explain` lists all families"
        parser.error(f"there is no '{family}'; {hint}")
    print(known[family][1])
    return 0
