"""Public functions and classes say what they do."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import mycoll
import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "python/mycoll"
OPTIONAL = {"adapters.torchft"}  # needs torchft


def undocumented(tree: ast.Module, module: object) -> list[str]:
    """The public functions, classes and methods of a module without a docstring of their own or
    of a base class."""
    found = []
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        thing = getattr(module, node.name)
        inside = node.body if isinstance(node, ast.ClassDef) else []
        methods = [each.name for each in inside if isinstance(each, ast.FunctionDef)]
        things = {node.name: thing}
        things |= {
            f"{node.name}.{name}": getattr(thing, name) for name in methods if name[0] != "_"
        }
        found += [name for name, each in things.items() if not inspect.getdoc(each)]
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda each: str(each.relative_to(PACKAGE))
)
def test_public_names_have_docstrings(path: Path) -> None:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__")
    if name in OPTIONAL or "__main__" in name:
        tree = ast.parse(path.read_text())
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert all(ast.get_docstring(each) for each in functions if each.name[0] != "_")
        return
    module = importlib.import_module(f"mycoll.{name}".rstrip("."))
    assert not undocumented(ast.parse(path.read_text()), module)


@pytest.mark.parametrize("name", sorted(set(mycoll.__all__) - {"__version__"}))
def test_public_functions_explain_their_arguments(name: str) -> None:
    """As far as they are written in Python: the names of all arguments occur."""
    thing = getattr(mycoll, name)
    assert inspect.getdoc(thing), name
    if not inspect.isfunction(thing):
        return
    text = inspect.getdoc(thing) or ""
    names = inspect.signature(inspect.unwrap(thing)).parameters
    assert [each for each in names if not re.search(rf"\b{each}\b", text)] == []


def test_a_missing_docstring_is_seen() -> None:
    class Module:
        @staticmethod
        def spoken() -> None:
            """Says something."""

        @staticmethod
        def silent() -> None:
            pass

    tree = ast.parse("def spoken(): ...\ndef silent(): ...\ndef _private(): ...")
    assert undocumented(tree, Module) == ["silent"]
