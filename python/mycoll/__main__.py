"""The command line: `mycoll VERB`, or `python -m mycoll VERB`."""

from __future__ import annotations

import difflib
import importlib
import json
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mycoll import _terminal
from mycoll._native import native, unknown_variables
from mycoll._terminal import quietly
from mycoll._version import __version__

Verb = Callable[[list[str]], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line with these words (sys.argv without them); returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return quietly(lambda: run(words))


def run(words: list[str]) -> int:
    """Runs the verb that the words begin with; returns the exit code."""
    verbs = known_verbs()
    parser = _terminal.Parser(
        prog="mycoll",
        usage="mycoll VERB [options]",
        description="A torch.distributed backend for CPU and CUDA tensors.",
        epilog="`mycoll VERB --help` explains a verb.",
    )
    parser.add_argument("--version", action="version", version=f"mycoll {__version__}")
    choices = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB")
    for name, (text, _) in verbs.items():
        choices.add_parser(name, help=text)
    if not words:
        parser.print_help()
        return 0
    if not words[0].startswith("-") and words[0] not in verbs:
        near = difflib.get_close_matches(words[0], verbs, 1)
        parser.error(f"unknown verb '{words[0]}'" + (f"; did you mean {near[0]}?" if near else ""))
    # Verbs parse their own options, so only the verb itself is this parser's business.
    verb = parser.parse_args(words[:1]).verb
    return verbs[verb][1](words[1:])


def known_verbs() -> dict[str, tuple[str, Verb]]:
    """Name, help text and function of each verb."""
    return {
        "demo": ("train on two ranks, then time mycoll beside gloo", in_module("demo")),
        "doctor": ("check this machine, and run a self-test", in_module("doctor")),
        "env": ("every MYCOLL_* variable: value, default, meaning", show_environment),
        "status": ("what running ranks do now, and which waits for which", in_module("status")),
        "top": ("the same, updated every second", in_module("status", watch=True)),
        "trace": ("what the ranks did last: which is missing, which differs", in_module("trace")),
        "explain": ("what an error means, and what to do", in_module("explain")),
        "metrics": ("counters of this host's ranks, for Prometheus", in_module("metrics")),
        "bench": ("time collectives beside gloo and nccl", in_module("bench")),
        "version": ("versions of mycoll, torch and Python", show_version),
    }


def in_module(name: str, **options: Any) -> Verb:
    """Imports a verb's module when it is called: most import torch, which takes seconds."""

    def call(words: list[str]) -> int:
        return int(importlib.import_module(f"mycoll.{name}").main(words, **options) or 0)

    return call


def show_version(words: list[str]) -> int:
    """Runs `mycoll version`."""
    parser = _terminal.Parser(prog="mycoll version")
    parser.add_argument("--json", action="store_true", help="for programs")
    as_json = parser.parse_args(words).json
    import torch

    versions = {"mycoll": __version__, "torch": str(torch.__version__)}
    versions["python"] = platform.python_version()
    problem = None
    try:
        native()
    except ImportError as error:
        problem = str(error)
    if as_json:
        print(json.dumps({**versions, "problem": problem}, indent=2))
    else:
        print("mycoll {mycoll}, torch {torch}, Python {python}".format(**versions))
        if problem:
            print(f"not usable: {problem}")
    return 1 if problem else 0


def show_environment(words: list[str]) -> int:
    """Runs `mycoll env`."""
    parser = _terminal.Parser(
        prog="mycoll env",
        description="Every MYCOLL_* variable with its value in this environment, and its meaning.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    as_json = parser.parse_args(words).json
    entries = native().environment()
    if as_json:
        print(json.dumps(entries, indent=2))
        return 0
    for entry in entries:
        line = f"{entry['name']}={entry['value']}"
        if entry["source"] != "default":
            line = _terminal.paint(line, "bold")
            origin = "" if entry["is_set"] else f"from {entry['source']}; "
            line += f"  ({origin}default: {entry['default'] or 'empty'})"
        print(line)
        for text in _terminal.wrapped(entry["help"], 4):
            print(f"    {text}")
    for name, hint in unknown_variables():
        print(_terminal.paint(f"{name} is set, but mycoll does not know it; {hint}", "yellow"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
