"""The command line of the fault tests: see `./dev faults --help`."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from mycoll._gloo import keep_names_honest
from worlds.pool import Options, Pool

from faults import deaths, elastic, lifecycle, misuse, network, stalls, strangers
from faults.harness import Outcome, Skip, Stage, show
from faults.report import Row, markdown

Scenario = Callable[[Stage], Outcome]

SCENARIOS: dict[str, Scenario] = {
    "1": deaths.in_loop,
    "2": deaths.with_memory,
    "3": deaths.while_idle,
    "4": deaths.in_init,
    "5": deaths.during_recv,
    "6": stalls.stop_and_go,
    "7": stalls.stop,
    "8": network.blackhole,
    "9": network.partition,
    "10": network.slow_and_lossy,
    "11": misuse.calls,
    "12": misuse.messages,
    "13": stalls.absent,
    "14": stalls.crossed_groups,
    "15": lifecycle.small_shm,
    "16": lifecycle.kill_storm,
    "17": misuse.worlds,
    "18": lifecycle.interrupts,
    "19a": lifecycle.fork,
    "19b": lifecycle.exit_without_destroy,
    "19c": lifecycle.exit_with_send,
    "20": strangers.junk,
    "21": elastic.while_recovering,
}
ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "build" / "faults.json"  # a run replaces the scenarios that it runs
Results = dict[str, dict[str, list[Outcome]]]  # by scenario, then by column


def title(scenario: Scenario) -> str:
    return (scenario.__doc__ or "").splitlines()[0].rstrip(".")


def load(path: Path) -> Results:
    if not path.exists():
        return {}
    data = json.loads(path.read_text())
    return {
        number: {column: [Outcome(**each) for each in runs] for column, runs in columns.items()}
        for number, columns in data.items()
    }


def save(path: Path, results: Results) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, default=asdict))


def play(scenario: Scenario, stage: Stage) -> Outcome:
    try:
        return scenario(stage)
    except Skip as reason:
        return Outcome("skip", notes=[str(reason)])
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".splitlines()
        return Outcome("FAIL", notes=[f"the test itself failed: {text[0]} {text[-1]}"[:300]])


def columns(args: argparse.Namespace) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for backend in args.backend.split(","):
        if backend == "mycoll":
            found += [(backend, transport) for transport in args.transport.split(",")]
        else:
            found.append((backend, ""))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        "./dev faults", description="Make ranks fail, and measure the others."
    )
    parser.add_argument("--backend", default="mycoll,gloo")
    parser.add_argument("--transport", default="shm,tcp")
    parser.add_argument("--only", default="", help="numbers of scenarios: 1,3,19a")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--results", "--json", type=Path, default=RESULTS, help="the file of results, in JSON"
    )
    parser.add_argument("--write", action="store_true", help="write the page even with --only")
    args = parser.parse_args()
    keep_names_honest("./dev faults")
    chosen = args.only.split(",") if args.only else list(SCENARIOS)
    kinds = columns(args)
    rows = [Row(number, title(SCENARIOS[number])) for number in chosen]
    kept = load(args.results)
    pools = {kind: Pool(Options(backend=kind[0])) for kind in kinds}
    failures = 0
    width = shutil.get_terminal_size((160, 40)).columns
    for row in rows:
        print(f"{row.number:>3} {row.title}", flush=True)
        for kind in kinds:
            column = " ".join(kind).strip()
            for repeat in range(args.repeats):
                began = time.monotonic()
                stage = Stage(pools[kind], kind[1], seed=random.randrange(1 << 30))
                outcome = play(SCENARIOS[row.number], stage)
                row.outcomes.setdefault(column, []).append(outcome)
                failures += outcome.verdict == "FAIL" and kind[0] == "mycoll"
                slowest = show(outcome.seconds) if outcome.seconds is not None else ""
                spent = show(time.monotonic() - began)
                print(f"      {column:12} {outcome.verdict:4} {slowest:>8}  (#{repeat}, {spent})")
                for note in outcome.notes:
                    print(f"          {note}"[:width])
                if outcome.sample:
                    print(f"          > {outcome.sample}"[: 4 * width], flush=True)
            kept.setdefault(row.number, {})[column] = row.outcomes[column]
        save(args.results, kept)
    if args.write or not args.only:
        whole = [
            Row(number, title(SCENARIOS[number]), kept.get(number, {})) for number in SCENARIOS
        ]
        DOC.write_text(markdown(whole))
        print(f"written to {DOC}", file=sys.stderr)
    for pool in pools.values():
        pool.close()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
