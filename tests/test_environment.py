"""The documented environment variables are those that the code knows, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/environment.md"
CODE = [
    path
    for folder, suffixes in [("csrc", {".h", ".cpp", ".inc"}), ("python/mycoll", {".py", ".pyi"})]
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in suffixes
]
VARIABLE = re.compile(r"\bMYCOLL_[A-Z0-9]+(?:_[A-Z0-9]+)*\b")


def documented() -> set[str]:
    return set(re.findall(r"^\| `(MYCOLL_\w+)` \|", PAGE.read_text(), re.MULTILINE))


def test_table_is_documented() -> None:
    table = (ROOT / "csrc/base/env.cpp").read_text()
    assert set(re.findall(r'^\s*\{"(MYCOLL_\w+)"', table, re.MULTILINE)) == documented()


def test_names_in_the_code_are_documented() -> None:
    """Also in messages and comments: a misspelt name there sends people the wrong way."""
    texts = {path: path.read_text() for path in CODE}
    macros = {
        name
        for text in texts.values()
        for name in re.findall(r"^\s*#\s*(?:define|ifn?def)\s+(MYCOLL_\w+)", text, re.MULTILINE)
    }
    for path, text in texts.items():
        unknown = set(VARIABLE.findall(text)) - macros - documented()
        assert not unknown, f"{path.relative_to(ROOT)} names {unknown}"


def test_only_the_table_reads_them() -> None:
    for path in CODE:
        if path.name != "env.cpp":
            assert not re.search(r'(getenv|environ\W.{0,9})\(?"MYCOLL_', path.read_text()), path


def test_page_is_up_to_date() -> None:
    pytest.importorskip("mycoll._C", reason="mycoll is not built", exc_type=ImportError)
    from mycoll.__main__ import environment_page

    assert PAGE.read_text().strip() == environment_page().strip(), (
        "run: ./dev python -m mycoll env --markdown > docs/environment.md"
    )
