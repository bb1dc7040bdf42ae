"""docs/ against the code: every error has a line, every link and command leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ERRORS = ROOT / "docs/errors.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
RAISES = re.compile(r"\b(?:Status\w*\(Code::k\w+,|refuse\(|TORCH_CHECK\(|C10_THROW_ERROR\()")
WORDS = 3  # of a message, in a row


def words(text: str) -> list[str]:
    return re.findall(r"[a-z][\w']*", re.sub(r"\\n", " ", text).lower())


def messages() -> list[tuple[str, list[str]]]:
    """Where, and the literal parts, of each error that csrc raises with text of its own."""
    found = []
    for path in sorted((ROOT / "csrc").rglob("*.cpp")):
        source = path.read_text()
        for match in RAISES.finditer(source):
            statement = source[match.end() : source.find(";\n", match.end())]
            # Neighbouring literals are one for the compiler.
            statement = re.sub(r'"\s*\n\s*"', "", statement)
            literals = re.findall(r'"((?:[^"\\]|\\.)*)"', statement)
            literals = [text for text in literals if len(words(text)) >= WORDS]
            if literals:
                line = source.count("\n", 0, match.start()) + 1
                found.append((f"{path.relative_to(ROOT)}:{line}", literals))
    return found


def test_every_error_is_explained() -> None:
    page = " ".join(words(ERRORS.read_text()))

    def is_there(literal: str) -> bool:
        parts = words(literal)
        runs = (parts[i : i + WORDS] for i in range(len(parts) - WORDS + 1))
        return any(" ".join(run) in page for run in runs)

    found = messages()
    assert len(found) > 50
    missing = [entry for entry in found if not any(map(is_there, entry[1]))]
    assert not missing, "docs/errors.md says nothing about:\n" + "\n".join(map(str, missing))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


# Each command that README tells people to type, and the test that types it.
COMMANDS = {
    "./dev demo": "test_demo.py",
    "./dev test": ".ci/run",
    'pip install cmake ninja wheel "setuptools>=77"': "test_packaging.py",
    "pip install --no-build-isolation .": "test_packaging.py",
    "mycoll doctor": "test_doctor.py",
    "torchrun --nproc-per-node 2 train.py": "test_examples.py",
    "mycoll bench all_reduce --nproc 2 --backend mycoll,gloo --plot all_reduce.png": (
        "test_bench.py"
    ),
}


def test_commands_of_readme() -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    lines = re.findall(r"^    (\S.*)", text, re.MULTILINE)
    typed = {re.sub(r"\s+#.*", "", line) for line in lines if not line.startswith("mycoll group")}
    assert typed == set(COMMANDS)
    for where in COMMANDS.values():
        assert (ROOT / where).exists() or (ROOT / "tests" / where).exists(), where


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_verbs(page: Path) -> None:
    """`./dev VERB` and `mycoll VERB` are verbs that exist."""
    text = page.read_text()
    dev = set(re.findall(r"^verb_(\w+)", (ROOT / "dev").read_text(), re.MULTILINE))
    assert set(re.findall(r"\./dev (\w+)", text)) <= dev | {"VERB"}
    own = set(re.findall(r'"(\w+)"', (ROOT / "python/mycoll/__main__.py").read_text()))
    assert set(re.findall(r"(?:`| -m )mycoll ([a-z]+)", text)) <= own
