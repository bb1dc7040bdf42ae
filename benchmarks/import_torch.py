"""Measures `import torch` with mycoll installed but unused, and without it.

    ./dev python benchmarks/import_torch.py --rounds 30

Each import runs in a new interpreter, and both alternate. The modules that are imported for mycoll
are also measured alone, by `-X importtime`. The goal is less than 2 ms.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time

LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s*(mycoll\S*)")


def environment(with_mycoll: bool) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MYCOLL_")}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)  # as an installed package, mycoll is compiled
    kept["TORCH_DEVICE_BACKEND_AUTOLOAD"] = str(int(with_mycoll))
    return kept


def run(with_mycoll: bool, *options: str) -> tuple[float, str]:
    command = [sys.executable, *options, "-c", "import torch"]
    began = time.perf_counter()
    done = subprocess.run(
        command, env=environment(with_mycoll), capture_output=True, text=True, check=True
    )
    return 1e3 * (time.perf_counter() - began), done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    run(True)  # compiles it
    imported = LINE.findall(run(True, "-X", "importtime")[1])
    assert imported, "torch does not find mycoll here"
    for own, name in imported:
        print(f"{name:30} {int(own) / 1e3:6.2f} ms")
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(rounds):
        for with_mycoll in (turn % 2 == 0, turn % 2 == 1):
            times[with_mycoll].append(run(with_mycoll)[0])
    having, lacking = (statistics.median(times[key]) for key in (True, False))
    differences = sorted(a - b for a, b in zip(times[True], times[False], strict=True))
    quarter = len(differences) // 4
    print(
        f"import torch: {having:.1f} ms with mycoll, {lacking:.1f} ms without; of pairs "
        f"{statistics.median(differences):+.2f} ms "
        f"[{differences[quarter]:+.2f}, {differences[-1 - quarter]:+.2f}]"
    )


if __name__ == "__main__":
    main()
