"""_C.pyi has the names of the compiled module, with the same parameters."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

STUB = Path(__file__).resolve().parent.parent / "python/mycoll/_C.pyi"


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return pytest.importorskip("mycoll._C", reason="mycoll is not built", exc_type=ImportError)


def definitions(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """The definitions in a module or class body of the stub, by name."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def is_for_typing_only(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and any(
        isinstance(base, ast.Name) and base.id in {"TypedDict", "Protocol"} for base in node.bases
    )


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def parameters(function: Any) -> list[list[str]]:
    """The parameter names of each overload, from the signatures in pybind11's docstring."""
    doc = inspect.getdoc(function) or ""
    found = []
    for line in doc.splitlines():
        signature = re.match(r"(?:\d+\. )?\w+\((.*)\) -> ", line)
        if signature and "*args" not in line:
            # Drop what is inside brackets, so that the commas left separate parameters.
            text, before = signature[1], ""
            while text != before:
                before, text = text, re.sub(r"\[[^\[\]]*\]|\([^()]*\)|<[^<>]*>", "", text)
            names = [part.split(":")[0].split("=")[0].strip() for part in text.split(",")]
            # **kwargs is only used to refuse unknown arguments, so the stub does not have it.
            found.append([n for n in names if n and n not in {"/", "*"} and n[:2] != "**"])
    return found


def check_parameters(where: str, node: ast.FunctionDef, function: Any) -> None:
    names = [arg.arg for arg in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
    overloads = parameters(function)
    if overloads:
        assert names in overloads, f"{where}: the stub has {names}, the module {overloads}"


def test_module(module: ModuleType) -> None:
    stub = definitions(ast.parse(STUB.read_text()).body)
    runtime = {name: node for name, node in stub.items() if not is_for_typing_only(node)}
    assert public(vars(module)) == public(runtime)
    for name, node in runtime.items():
        if isinstance(node, ast.FunctionDef):
            check_parameters(name, node, getattr(module, name))


def test_classes(module: ModuleType) -> None:
    for node in ast.parse(STUB.read_text()).body:
        if not isinstance(node, ast.ClassDef) or is_for_typing_only(node):
            continue
        members = definitions(node.body)
        actual = getattr(module, node.name)
        assert public(vars(actual)) == public(members), node.name
        for name, member in members.items():
            assert hasattr(actual, name), f"{node.name}.{name}"
            if isinstance(member, ast.FunctionDef) and not member.decorator_list:
                check_parameters(f"{node.name}.{name}", member, getattr(actual, name))
