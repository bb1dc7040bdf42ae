"""Public functions and classes, and those of the compiled module, have complete docstrings."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import logging
import re
import sys
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any

import mycoll
import pytest
import torch
import torch.distributed as dist
from mycoll._native import native
from worlds import warm

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python/mycoll"
OPTIONAL = {"adapters.torchft"}  # needs torchft

spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/site/reference.py")
assert spec and spec.loader
reference = importlib.util.module_from_spec(spec)
sys.modules["reference"] = reference  # for its dataclass
spec.loader.exec_module(reference)


def undocumented(tree: ast.Module, module: object) -> list[str]:
    """The public functions, classes and methods of a module without a docstring, their own or that
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


def test_a_missing_docstring_is_found() -> None:
    class Module:
        @staticmethod
        def documented() -> None:
            """Does something."""

        @staticmethod
        def bare() -> None:
            pass

    tree = ast.parse("def documented(): ...\ndef bare(): ...\ndef _private(): ...")
    assert undocumented(tree, Module) == ["bare"]


# --- Args and Returns -----------------------------------------------------------------------------


def mistakes(docstring: str, parameters: set[str], returns: bool) -> list[str]:
    """The mistakes of a docstring for a function with these parameters."""
    doc = reference.parse(docstring)
    found = [] if doc.text else ["no description"]
    if set(doc.args) != parameters:
        found.append(f"Args has {sorted(doc.args)}, the function {sorted(parameters)}")
    if returns and not doc.returns:
        found.append("no Returns")
    return found


def test_mistakes_in_docstrings_are_found() -> None:
    good = "Adds.\n\nArgs:\n    x: One.\n\nReturns:\n    The sum."
    assert not mistakes(good, {"x"}, returns=True)
    assert mistakes(good, {"x", "y"}, returns=True) == ["Args has ['x'], the function ['x', 'y']"]
    assert mistakes("Adds.", set(), returns=True) == ["no Returns"]
    assert mistakes("f(x: int) -> int\n", set(), returns=False) == ["no description"]


# Not called by users; its timeout is that of recover().
EXCUSED = {"SpawnError.__init__", "ElasticGroup.admit"}


def public_functions() -> dict[str, Any]:
    """The public functions, and the methods of public classes, that are written in Python."""
    found = {}
    for name in sorted(mycoll.__all__):
        thing = getattr(mycoll, name)
        if inspect.isfunction(thing):
            found[name] = thing
        elif inspect.isclass(thing) and thing.__module__.startswith("mycoll."):
            for method, each in vars(thing).items():
                if inspect.isfunction(each) and (method[0] != "_" or method == "__init__"):
                    found[f"{name}.{method}"] = each
    return {name: each for name, each in found.items() if name not in EXCUSED}


@pytest.mark.parametrize("name", sorted(public_functions()))
def test_public_functions_document_their_arguments(name: str) -> None:
    function = public_functions()[name]
    signature = inspect.signature(inspect.unwrap(function))
    parameters = set(signature.parameters) - {"self"}
    returns = signature.return_annotation not in ("None", "Iterator[None]")
    text = inspect.getdoc(function) or ""
    if name.endswith(".__init__"):  # the class has them
        text, returns = inspect.getdoc(getattr(mycoll, name.split(".")[0])) or "", False
    assert not mistakes(text, parameters, returns)


def compiled_names() -> list[str]:
    """The functions, classes, methods and properties that csrc/bindings defines."""
    module = native()
    names = []
    for name, thing in vars(module).items():
        is_ours = getattr(thing, "__module__", None) == "mycoll._C"
        if inspect.isclass(thing) and is_ours:
            members = [each for each, what in vars(thing).items() if is_bound(each, what)]
            names += [name, *(f"{name}.{each}" for each in members)]
        elif inspect.isbuiltin(thing):
            names.append(name)
    return sorted(names)


def is_bound(name: str, member: object) -> bool:
    """Whether csrc/bindings defines this member of a class, not pybind11 or Python."""
    if isinstance(member, property):
        return name not in ("__doc__", "__members__", "name", "value")  # of an enumeration
    of_all = {"__hash__", "__repr__", "__str__", "_pybind11_conduit_v1_"}
    of_enumerations = {"__eq__", "__ne__", "__index__", "__int__", "__getstate__", "__setstate__"}
    is_method = type(member).__name__ == "instancemethod"
    return is_method and name not in of_all | of_enumerations


@pytest.mark.parametrize("name", compiled_names())
def test_compiled_names_are_documented(name: str) -> None:
    thing: Any = native()
    for part in name.split("."):
        thing = getattr(thing, part)
    text = inspect.getdoc(thing) or ""
    signature = re.match(r"\w+\((.*)\) -> (.*)\n", text)
    assert reference.parse(text).text
    is_private = any(re.match("_[^_]", part) for part in name.split("."))
    if not signature or is_private:  # a class, a property, or internal
        return
    plain, before = signature[1], ""
    while plain != before:  # without what is inside brackets
        before, plain = plain, re.sub(r"\[[^\[\]]*\]|\([^()]*\)|<[^<>]*>", "", plain)
    names = {part.split(":")[0].split("=")[0].strip(" *") for part in plain.split(",")}
    is_constructor = name.endswith(".__init__") and ": WindowAccessType" in plain
    if not is_constructor:  # of an enumeration: pybind11's
        assert not mistakes(text, names - {"self", "kwargs", "arg0", ""}, signature[2] != "None")


def test_there_are_compiled_names() -> None:
    assert {"Options", "_Endpoint.form", "Window.put", "dump_trace"} <= set(compiled_names())


# --- examples -------------------------------------------------------------------------------------


def examples() -> dict[str, str]:
    """The examples in the docstrings of public names."""
    found = {}
    for name in sorted(set(mycoll.__all__) - {"__version__"}):
        if example := reference.parse(inspect.getdoc(getattr(mycoll, name)) or "").example:
            found[name] = example
    return found


# Classes of torch, and errors.
WITHOUT = {"ArgumentError", "PutOptions", "SignalOptions", "SpawnError", "WaitSignalOptions"}
# Part of a longer program (examples/elastic.py), and those that need a GPU (tests/test_device_*).
NOT_RUN = {"ElasticGroup", "deregister_mem_pool", "nccl_mem_pool", "register_mem_pool"}
# Run in their own processes.
ALONE = {"log_to_python", "spawn"}


def test_public_names_have_examples() -> None:
    assert set(examples()) == set(mycoll.__all__) - {"__version__"} - WITHOUT
    for name, example in examples().items():
        compile(example, name, "exec")


def run_examples(ctx: Any, programs: dict[str, str], folder: str) -> None:
    for name, program in programs.items():
        program = program.replace("/tmp", folder)
        known = {"mycoll": mycoll, "torch": torch, "dist": dist, "logging": logging}
        exec(compile(program, name, "exec"), known | {"timedelta": timedelta})
        dist.barrier()


@pytest.mark.worlds(2)
def test_examples_run(world: Any, tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    programs = {k: v for k, v in examples().items() if k not in NOT_RUN | ALONE}
    world.run(run_examples, programs, str(tmp_path))
    assert len(list((tmp_path / "trace").iterdir())) == 2


@pytest.mark.tools
def test_example_of_spawn() -> None:
    known: dict[str, Any] = {"mycoll": mycoll, "dist": dist}
    exec(examples()["spawn"], known)
    assert known["ranks"] == [0, 1]


def test_example_of_log_to_python() -> None:
    program = "import logging, mycoll\n" + examples()["log_to_python"]
    program += "\nlogging.getLogger('mycoll').warning('as the engine does')"
    done = warm.start(program)
    output = done.communicate(timeout=60)
    assert done.returncode == 0 and output == ("", "as the engine does\n"), output


def test_an_example_is_found() -> None:
    text = "Adds.\n\nExample:\n    x = 1\n    if x:\n        y = 2\n"
    assert reference.parse(text).example == textwrap.dedent("""\
        x = 1
        if x:
            y = 2""")
