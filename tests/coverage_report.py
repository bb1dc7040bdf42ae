"""Reports which lines and functions of some folders of csrc/ ran, as counted by gcov in a build
tree.

    cmake --preset coverage && cmake --build --preset coverage
    PYTHONPATH=build/coverage/site pytest tests/test_cpp.py -k nccl
    PYTHONPATH=build/coverage/site pytest tests/test_device_*.py
    python tests/coverage_report.py build/coverage csrc/nccl csrc/device

A later run adds to the counts, which are the files *.gcda in the tree.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def ranges(numbers: list[int]) -> str:
    """ "3-5 9" for 3, 4, 5, 9."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return " ".join("-".join(map(str, part)) for part in parts)


def counted(tree: Path) -> tuple[dict[str, dict[int, int]], dict[str, dict[str, int]]]:
    """How often each line and each function ran, by file of the repository."""
    lines: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    functions: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    # Includes compiled files that never ran. Only files of the repository, because the output for
    # torch's headers would be a gigabyte.
    own = ["--relative-only", "--source-prefix", str(ROOT)]
    for notes in sorted(tree.rglob("*.gcno")):
        command = ["gcov", "--json-format", "--stdout", "--demangled-names", *own, str(notes)]
        answer = subprocess.run(command, capture_output=True, text=True, cwd=tree)
        for text in answer.stdout.splitlines():
            for file in json.loads(text)["files"]:
                path = (ROOT / file["file"]).resolve()
                if not path.is_relative_to(ROOT):
                    continue
                name = str(path.relative_to(ROOT))
                for line in file["lines"]:
                    lines[name][line["line_number"]] += line["count"]
                for function in file["functions"]:
                    key = f"{function['start_line']} {function['demangled_name'].split('(')[0]}"
                    functions[name][key] += function["execution_count"]
    return lines, functions


def main() -> int:
    tree, *folders = sys.argv[1:]
    lines, functions = counted(Path(tree).resolve())
    total = ran = called = known = 0
    for name in sorted(lines):
        if not any(name.startswith(f"{folder}/") for folder in folders):
            continue
        here = sum(1 for count in lines[name].values() if count)
        total, ran = total + len(lines[name]), ran + here
        print(f"{100 * here / len(lines[name]):5.1f} %  {here:4} of {len(lines[name]):4}  {name}")
        missed = [key for key, count in functions[name].items() if not count]
        known, called = known + len(functions[name]), called + len(functions[name]) - len(missed)
        for key in sorted(missed, key=lambda k: int(k.split()[0])):
            print(f"          never called: {key}")
        if idle := ranges(sorted(number for number, count in lines[name].items() if not count)):
            print(f"          never run: {idle}")
    if not total:
        print("nothing was counted: is the tree built with -DMYCOLL_COVERAGE=ON?", file=sys.stderr)
        return 1
    print(f"{100 * ran / total:5.1f} %  {ran:4} of {total:4}  lines")
    print(f"{100 * called / known:5.1f} %  {called:4} of {known:4}  functions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
