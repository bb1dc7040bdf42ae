"""The command line: `mycoll VERB`, or `python -m mycoll VERB`."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from typing import Any

from mycoll._pipes import quietly
from mycoll._registration import native
from mycoll._version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    return quietly(lambda: run(words))


def run(words: list[str]) -> int:
    # These have options of their own; argparse would want to know them.
    if words[:1] == ["demo"]:
        from mycoll import demo

        return demo.main(words[1:])
    if words[:1] == ["bench"]:
        from mycoll.bench import main as bench_main

        return int(bench_main(words[1:]) or 0)

    if words[:1] in (["status"], ["top"]):
        from mycoll import status

        return status.main(words[1:], watch=words[0] == "top")
    if words[:1] == ["faults"]:
        from mycoll import faults

        return faults.main(words[1:])
    if words[:1] == ["trace"]:
        from mycoll import trace

        return trace.main(words[1:])

    parser = argparse.ArgumentParser(prog="mycoll", description="A torch.distributed backend.")
    parser.add_argument("--version", action="version", version=f"mycoll {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("demo", help="train on two ranks, then time mycoll beside gloo")
    verbs.add_parser("status", help="what running ranks are at, and who waits for whom")
    verbs.add_parser("top", help="the same, again and again")
    verbs.add_parser("trace", help="compare what the ranks did last: who did not come, who differs")
    verbs.add_parser("bench", help="time collectives; `mycoll bench --help` tells more")
    verbs.add_parser("faults", help="break ranks on purpose, and time the others beside gloo")
    version = verbs.add_parser("version", help="versions of mycoll, torch and Python")
    version.add_argument("--json", action="store_true", help="for programs")
    doctor = verbs.add_parser("doctor", help="check this machine, and run a self-test")
    doctor.add_argument("--json", action="store_true", help="for programs")
    env = verbs.add_parser("env", help="every MYCOLL_* variable: value, default, meaning")
    env.add_argument("--markdown", action="store_true", help="as docs/environment.md")
    env.add_argument("--json", action="store_true", help="for programs")
    parsed = parser.parse_args(words)
    if parsed.verb == "version":
        return show_version(parsed.json)
    if parsed.verb == "doctor":
        from mycoll import doctor as surgery

        return surgery.main(parsed.json)
    return show_environment(parsed.markdown, parsed.json)


def show_version(as_json: bool) -> int:
    import torch

    versions = {
        "mycoll": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
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


def show_environment(markdown: bool, as_json: bool) -> int:
    entries = native().environment()
    if as_json:
        print(json.dumps(entries, indent=2))
    elif markdown:
        print(environment_page())
    else:
        for entry in entries:
            print(f"{entry['name']}={entry['value']}  ({source_of(entry)})\n    {entry['help']}")
    return 0


def source_of(entry: dict[str, Any]) -> str:
    if entry["is_set"]:
        return "set"
    return "default" if entry["source"] == "default" else f"from {entry['source']}"


def environment_page() -> str:
    """docs/environment.md; a test holds the file against this."""
    lines = [
        "# Environment variables",
        "",
        "Read when a process makes its first group, and kept. `mycoll env` shows the values in",
        "force. Written by `mycoll env --markdown` from the table in `csrc/base/env.cpp`.",
        "",
        "| Variable | Default | Meaning |",
        "|---|---|---|",
    ]
    for entry in native().environment():
        default = f"`{entry['default']}`" if entry["default"] else ""
        lines.append(f"| `{entry['name']}` | {default} | {' '.join(entry['help'].split())} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
