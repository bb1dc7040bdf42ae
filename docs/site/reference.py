"""Fills docs/api.md with the signatures and docstrings of the public names, and writes
docs/environment.md.

`./dev python docs/site/reference.py` writes what belongs between each `<!-- docstring: NAME -->`
and the next `<!-- end -->`. With --check it changes nothing: its exit code is 1 if a page is not
up to date. Signatures come from the sources (_C.pyi for compiled names), docstrings from the
modules.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import textwrap
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python/mycoll"
PAGE = ROOT / "docs/api.md"
VARIABLES = ROOT / "docs/environment.md"
MARKED = re.compile(r"(<!-- docstring: (\S+) -->\n).*?(<!-- end -->)", re.S)
SECTION = re.compile(
    r"^(Args|Attributes|Returns|Raises|Example):?:\n((?:(?:    .*)?(?:\n|\Z))+)", re.M
)
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Docstring:
    """A docstring, taken apart."""

    text: str  # what stands before the first section
    args: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    returns: str = ""
    raises: dict[str, str] = field(default_factory=dict)
    example: str = ""


def entries(section: str) -> dict[str, str]:
    """The `name: text` entries of a section."""
    found = re.findall(r"^(\*{0,2}[\w.]+): (.*(?:\n .*)*)", section, re.M)
    return {name: " ".join(text.split()) for name, text in found}


def parse(docstring: str) -> Docstring:
    """Takes a docstring apart; of a compiled function it begins with pybind11's signature."""
    docstring = inspect.cleandoc(re.sub(r"\A\w+\(.*\) -> .*\n", "", docstring))
    sections = {
        name: textwrap.dedent(text).strip("\n") for name, text in SECTION.findall(docstring)
    }
    return Docstring(
        SECTION.split(docstring)[0].strip(),
        entries(sections.get("Args", "")),
        entries(sections.get("Attributes", "")),
        " ".join(sections.get("Returns", "").split()),
        entries(sections.get("Raises", "")),
        sections.get("Example", ""),
    )


@cache
def source(module: str) -> dict[str, ast.stmt]:
    """What a module of the package defines, by name."""
    path = PACKAGE / (module.replace(".", "/") + (".pyi" if module == "_C" else ".py"))
    return {each.name: each for each in ast.parse(path.read_text()).body if hasattr(each, "name")}


def parameters(arguments: ast.arguments) -> list[str]:
    """The parameters as they are written in a call of `def`; private constants as `...`."""

    def shown(each: ast.arg, default: ast.expr | None) -> str:
        value = "" if default is None else re.sub(r"\b_[A-Z]+\b", "...", ast.unparse(default))
        return f"{each.arg}: {ast.unparse(each.annotation)}" + (f" = {value}" if value else "")

    missing = [None] * (len(arguments.args) - len(arguments.defaults))
    found = [
        shown(*each) if each[0].annotation else each[0].arg  # self
        for each in zip(arguments.args, missing + arguments.defaults, strict=True)
    ]
    if arguments.vararg:
        found.append("*" + shown(arguments.vararg, None))
    elif arguments.kwonlyargs:
        found.append("*")
    found += map(shown, arguments.kwonlyargs, arguments.kw_defaults)
    return found + ([f"**{shown(arguments.kwarg, None)}"] if arguments.kwarg else [])


def signature(name: str, function: ast.FunctionDef, is_method: bool) -> str:
    """How to call the function: on one line if it fits."""
    parts = parameters(function.args)[1 if is_method else 0 :]
    is_init = function.name == "__init__"
    returns = "" if is_init or not function.returns else f" -> {ast.unparse(function.returns)}"
    one = f"{name}({', '.join(parts)}){returns}"
    if len(one) <= 100:
        return one
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){returns}"])


def table(head: str, rows: dict[str, str]) -> list[str]:
    """A table of names and texts."""
    lines = [f"| `{name}` | {text.replace('|', chr(92) + '|')} |" for name, text in rows.items()]
    return [f"| {head} | Meaning |\n|---|---|\n" + "\n".join(lines)] if rows else []


def show(doc: Docstring) -> list[str]:
    """The paragraphs of a docstring in Markdown."""
    parts = [doc.text, *table("Parameter", doc.args), *table("Attribute", doc.attributes)]
    if doc.returns:
        parts.append(f"**Returns:** {doc.returns}")
    if doc.raises:
        parts.append("**Raises:**\n\n" + "\n".join(f"- `{k}`: {v}" for k, v in doc.raises.items()))
    if doc.example:
        parts.append(f"```python\n{doc.example}\n```")
    return parts


def code(text: str) -> str:
    """A block of Python."""
    return f"```python\n{text}\n```"


def is_property(function: ast.FunctionDef) -> bool:
    """Whether it is read like an attribute."""
    return any(ast.unparse(each) == "property" for each in function.decorator_list)


def describe_class(name: str, thing: Any, node: ast.ClassDef) -> list[str]:
    """A class: how to make one, its attributes, then its methods."""
    functions = [each for each in node.body if isinstance(each, Function)]
    methods = [each for each in functions if each.name[0] != "_" and not is_property(each)]
    doc = parse(inspect.getdoc(thing) or "")
    names = [each.name for each in functions if is_property(each) and each.name[0] != "_"]
    names += [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)]
    attributes = {each: parse(inspect.getdoc(getattr(thing, each)) or "").text for each in names}
    doc.attributes = {
        each: " ".join(text.split()) for each, text in attributes.items()
    } | doc.attributes
    parts = []
    for each in functions:
        if each.name == "__init__":
            doc.args = doc.args or parse(inspect.getdoc(thing.__init__) or "").args
            doc.attributes = {k: v for k, v in doc.attributes.items() if k not in doc.args}
            parts.append(code(signature(name, each, is_method=True)))
    parts += show(doc)
    for each in methods:
        parts.append(f"#### `{name}.{each.name}`".replace("mycoll.", "", 1))
        parts.append(code(signature(each.name, each, is_method=True)))
        parts += show(parse(inspect.getdoc(getattr(thing, each.name)) or ""))
    return parts


def describe(name: str) -> str:
    """The Markdown for a public name, such as mycoll.spawn."""
    import mycoll

    short = name.removeprefix("mycoll.")
    thing = getattr(mycoll, short, None)
    if short == "Options.nccl":
        short, thing = "NcclOptions", type(mycoll.Options().nccl)
    module = str(thing.__module__)
    module = module.removeprefix("mycoll.") if module.startswith("mycoll.") else "__init__"
    if short not in source(module):  # ArgumentError, and what is torch's own from torch 2.14 on
        module = "_C"
    node = source(module)[short]
    parts = [f"### `{name}`"]
    if isinstance(node, ast.ClassDef):
        parts += describe_class(name, thing, node)
    else:
        assert isinstance(node, ast.FunctionDef)
        parts.append(code(signature(name, node, is_method=False)))
        parts += show(parse(inspect.getdoc(thing) or ""))
    return "\n\n".join(part for part in parts if part)


def variables() -> str:
    """The page about the environment variables."""
    from mycoll._native import native

    lines = [
        "# Environment variables",
        "",
        "Read when a process makes its first group, and kept. `mycoll env` shows the values in",
        "force. Written by `docs/site/reference.py` from the table in `csrc/base/env.cpp`.",
        "",
        "| Variable | Default | Meaning |",
        "|---|---|---|",
    ]
    for entry in native().environment():
        default = f"`{entry['default']}`" if entry["default"] else ""
        lines.append(f"| `{entry['name']}` | {default} | {' '.join(entry['help'].split())} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Writes the pages, or checks them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="exit code 1 if a page is not up to date"
    )
    is_check = parser.parse_args().check
    now = PAGE.read_text()
    page = MARKED.sub(lambda each: f"{each[1]}\n{describe(each[2])}\n\n{each[3]}", now)
    if is_check:
        return page != now or VARIABLES.read_text() != variables()
    PAGE.write_text(page)
    VARIABLES.write_text(variables())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
