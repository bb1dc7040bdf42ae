"""Checks docs/ and other pages: tables, links, anchors, commands, errors, the API."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick  # seconds for all of them

ROOT = Path(__file__).resolve().parent.parent
ERRORS = ROOT / "docs/errors.md"
API = ROOT / "docs/api.md"
FOLDERS = ("", "docs", "examples", "csrc", "benchmarks", "benchmarks/results", "tests/standins")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))
USER_PAGES = sorted(page for folder in FOLDERS[:3] for page in (ROOT / folder).glob("*.md"))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(text: str) -> list[str]:
    """The lines outside of fenced blocks; those inside become empty, which keeps line numbers."""
    lines = []
    is_fenced = False
    for line in text.splitlines():
        is_fence = line.lstrip().startswith("```")
        lines.append("" if is_fenced or is_fence else line)
        is_fenced ^= is_fence
    return lines


# --- tables ---------------------------------------------------------------------------------------


def cells(row: str) -> list[str]:
    """Splits a row as GitHub does: at each | without a backslash, also inside `code`."""
    return re.split(r"(?<!\\)\|", row.strip().strip("|"))


def table_mistakes(text: str) -> list[str]:
    mistakes = []
    lines = [*prose(text), ""]
    head = ""  # the first row of the table that this line is in
    for number, line in enumerate(lines, 1):
        if not line.startswith("|"):
            head = ""
            continue
        if not head:
            head = line
            if not re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", lines[number].strip()):
                mistakes.append(f"line {number}: a row outside of its table")
        if len(cells(line)) != len(cells(head)):
            mistakes.append(f"line {number}: {len(cells(line))} cells, its head {len(cells(head))}")
        if not line.rstrip().endswith("|"):
            mistakes.append(f"line {number}: the row does not end with |")
    return mistakes


def test_mistakes_in_tables_are_found() -> None:
    assert not table_mistakes("| a | b |\n|---|---|\n| `x \\| y` | 2 |\n\ntext\n")
    assert table_mistakes("| a | b |\n|---|---|\n| 1 | 2 | 3 |\n") == [
        "line 3: 3 cells, its head 2"
    ]
    assert table_mistakes("| a |\n|---|\n| 1 |\n\n| 2 |\n") == [
        "line 5: a row outside of its table"
    ]
    assert not table_mistakes("```\n| no table\n```\n")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables(page: Path) -> None:
    assert not table_mistakes(page.read_text())


# --- links ----------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    found: set[str] = set()
    for line in prose(page.read_text()):
        if heading := re.match(r"#+ (.+)", line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            same = sum(
                each == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", each) is not None
                for each in found
            )
            found.add(f"{slug}-{same}" if same else slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", "\n".join(prose(page.read_text()))):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path) if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_every_page_is_linked() -> None:
    """From the site's navigation, and from docs/README.md."""
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = set(re.findall(r": (\S+\.md)$", nav, re.M))
    assert pages <= named
    assert all((ROOT / "docs" / each).exists() or (ROOT / each).exists() for each in named)
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)\)", (ROOT / "docs/README.md").read_text()))
    assert pages - {"README.md"} == linked


# --- README ---------------------------------------------------------------------------------------


def test_readme_is_a_first_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 700, "move something to docs/"
    assert len(re.findall(r"^\|[-| :]+\|$", text, re.M)) <= 1, "one table at most"


def test_the_picture_shows_the_recorded_results() -> None:
    draws = [sys.executable, str(ROOT / "benchmarks/picture.py"), "--check"]
    assert subprocess.run(draws).returncode == 0, "run benchmarks/picture.py"


# --- docs/errors.md -------------------------------------------------------------------------------


def families() -> dict[str, str]:
    """The sections of docs/errors.md about families of errors, by heading."""
    parts = re.split(r"^### (.+)\n", ERRORS.read_text(), flags=re.M)
    texts = [re.split(r"^## ", part, flags=re.M)[0] for part in parts[2::2]]
    return dict(zip(parts[1::2], texts, strict=True))


def test_there_are_families_of_errors() -> None:
    assert len(families()) >= 20


@pytest.mark.parametrize("family", families())
def test_family_of_errors(family: str) -> None:
    """Each family has an example, then the cause, then the remedy."""
    text = families()[family]
    assert re.match(r"\n```\n\S[^`]+\n```\n", text), "an example comes first"
    assert re.search(r"^\*\*Cause\.\*\* \S.*^\*\*What to do\.\*\* ?\S?", text, re.M | re.S), text


# The parts of a quoted error that vary, such as names and numbers.
VARIABLE = re.compile(
    r"""
      rank\ \d+(?:\ \([^)]*\))?                       # rank 3 (node1:4711)
    | '[^']*' | \.\.\. | \bN\b | [\w./:-]*\d[\w./:-]*  # a group, what is left out, a number
    | \b(?:MYCOLL|NCCL|CUDA)_\w+(?:=\w+)?               # a variable
    | \bnccl[A-Z]\w+                                    # a function of NCCL
    | \b(?:all_reduce|broadcast|send|recv)\b            # an operation, and what describes it
    | \b(?:SUM|AVG|BAND|PRODUCT|Float|SparseCsr)\b
    | \bit\ in\b | (?<=expected\ ).*                   # or "them in"; what a variable accepts
    | [;:.]\s | [()]                                   # between texts that are put together
    """,
    re.VERBOSE,
)
# Messages of the system, NCCL and CUDA, which follow mycoll's text.
OF_OTHERS = {
    "CUDA error",
    "Connection reset by peer",
    "Connection timed out",
    "Operation not permitted",
    "Too many open files",
    "cannot open shared object file",
    "an illegal memory access was encountered",
    "last error",
    "unhandled system error",
}


def fixed_words(quoted: str) -> list[str]:
    """The constant parts of a quoted error that have at least two words."""
    pieces = (piece.strip(" :;,.()=#") for piece in VARIABLE.sub("\n", quoted).splitlines())
    return [piece for piece in pieces if " " in piece and piece not in OF_OTHERS]


def cpp_strings(source: str) -> list[str]:
    """The string literals of C++ outside of comments; adjacent ones are joined."""
    found = [""]
    token = r"""(//[^\n]*|/\*.*?\*/|'(?:\\.|[^'\\])'|\s+)|"((?:\\.|[^"\\\n])*)"|."""
    for match in re.finditer(token, source, re.DOTALL):
        if match[2] is not None:
            found[-1] += match[2].replace("\\n", " ").replace('\\"', '"')
        elif match[1] is None and found[-1]:
            found.append("")
    return found


def is_in_code(piece: str) -> bool:
    """Whether the code has this text; its first or its last word may be a name."""
    words = piece.split()
    parts = [piece] + [" ".join(part) for part in (words[1:], words[:-1]) if len(part) > 1]
    return any(part in texts_of_code() for part in parts)


@cache
def texts_of_code() -> str:
    """All string literals of csrc/ and python/mycoll, one line each."""
    texts = []
    for source in sorted((ROOT / "csrc").rglob("*")):
        if source.suffix in {".h", ".cpp", ".inc"}:
            texts += cpp_strings(source.read_text())
    for source in sorted((ROOT / "python/mycoll").rglob("*.py")):
        nodes = ast.walk(ast.parse(source.read_text()))
        texts += [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    return "\n".join(" ".join(text.split()) for text in texts)


def test_fixed_words() -> None:
    assert fixed_words("mycoll group '0': rank 2 (node1:4713) has given up: ...") == [
        "mycoll group",
        "has given up",
    ]
    code = """f("one "  // not "this"\n  "two", '"', "three");  /* "four" */ g("a\\n  b");"""
    assert [text for text in cpp_strings(code) if text] == ["one two", "three", "a   b"]


@pytest.mark.parametrize("family", families())
def test_quoted_errors_exist(family: str) -> None:
    text = families()[family]
    quoted = re.findall(r"\n```\n([^`]+)\n```\n", text)
    for also in re.findall(r"^Also: (.+?)\n\n", text, re.M | re.S):
        quoted += re.findall(r"`([^`]+)`", also.replace("\n", " "))
    for row in re.findall(r"^\| (`.+?) \|", text, re.M):
        quoted += re.findall(r"`([^`]+)`", row)
    words = {piece for each in quoted for piece in fixed_words(each)}
    assert not {piece for piece in words if not is_in_code(piece)}


# --- docs/api.md ----------------------------------------------------------------------------------


def test_api_has_every_name() -> None:
    import mycoll

    text = API.read_text()
    names = re.findall(r"^<!-- docstring: mycoll\.(\S+) -->$", text, re.M)
    names += re.findall(r"^`mycoll\.(\w+)` is ", text, re.M)
    assert sorted(names) == sorted([*mycoll.__all__, "Options.nccl"])


def test_api_shows_the_docstrings() -> None:
    import mycoll

    if mycoll.PutOptions.__module__ != "mycoll._C":
        pytest.skip("some of the names are torch's own: the page is made with an older torch")
    script = ROOT / "docs/site/reference.py"
    done = subprocess.run([sys.executable, str(script), "--check"])
    assert done.returncode == 0, "run ./dev python docs/site/reference.py"


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", API.read_text(), re.M | re.S)
    assert found, title
    return found[1]


def test_api_has_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    from mycoll.__main__ import main

    with pytest.raises(SystemExit):
        main(["--help"])
    shown = set(re.findall(r"^ +([a-z]+)  +\S", capsys.readouterr().out, re.M))
    documented = set(re.findall(r"^\| `mycoll (\w+)", section("Command line"), re.M))
    # --help shows `faults` only in a checkout.
    assert documented - {"faults"} <= shown <= documented


# --- commands -------------------------------------------------------------------------------------

# Each command in the README, and the test that runs it.
COMMANDS = {
    "./dev demo": "test_demo.py",
    "pip install mycoll-0.1.0-cp311-cp311-manylinux_2_27_x86_64.whl": "test_wheel.py",
    "./dev test --quick": "test_dev.py",
    'pip install cmake ninja wheel "setuptools>=77"': "test_packaging.py",
    "pip install --no-build-isolation .": "test_packaging.py",
    "mycoll doctor": "test_doctor.py",
    "torchrun --nproc-per-node 2 train.py": "test_examples.py",
    "mycoll bench all_reduce -b 4 -e 64M -f 4 --nproc 2 --backend mycoll,gloo --plot plot.png": (
        "test_bench.py"
    ),
}


def test_commands_of_readme() -> None:
    lines = re.findall(r"^    (\S.*)", "\n".join(prose((ROOT / "README.md").read_text())), re.M)
    typed = {re.sub(r"\s+#.*", "", line) for line in lines}
    assert typed == set(COMMANDS)
    for where in COMMANDS.values():
        assert (ROOT / "tests" / where).exists(), where


@pytest.mark.parametrize("page", USER_PAGES, ids=name_of)
def test_verbs(page: Path) -> None:
    """`./dev VERB` and `mycoll VERB` name verbs that exist."""
    text = page.read_text()
    scripts = [ROOT / "dev", *(ROOT / ".ci").glob("*.sh")]
    dev = {verb for file in scripts for verb in re.findall(r"(?m)^verb_(\w+)", file.read_text())}
    assert set(re.findall(r"\./dev (\w+)", text)) <= dev | {"VERB"}
    own = set(re.findall(r'"(\w+)"', (ROOT / "python/mycoll/__main__.py").read_text()))
    assert set(re.findall(r"(?:`| -m )mycoll ([a-z]+)", text)) <= own


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name != "results"], ids=name_of)
def test_operations_of_bench(page: Path) -> None:
    """The word after `mycoll bench` is an operation. Pages of results keep their old commands."""
    from mycoll.bench.options import OPERATIONS

    for named in re.findall(r"mycoll bench ([a-z_,]+)", page.read_text()):
        assert set(named.split(",")) <= {*OPERATIONS, "all", "compare"}, named
