"""`mycoll bench`: from the command line to the rows."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mycoll._pipes import quietly
from mycoll.bench.compare import compare_main
from mycoll.bench.contenders import Contender, gather_contenders
from mycoll.bench.launch import (
    end_with_parent,
    ended_when_unread,
    run_ranks,
    started_here,
    under_launcher,
    under_torchrun,
)
from mycoll.bench.machine import header
from mycoll.bench.options import Options, parse_options
from mycoll.bench.peers import gather_peers
from mycoll.bench.progress import Progress
from mycoll.bench.report import Recorder, table_header, table_line, unwritable
from mycoll.bench.rounds import History, Measurement, cases
from mycoll.bench.startup import measure_startup
from mycoll.bench.world import World, join, leave

_FAILED = 1
_BAD_USE = 2


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    return quietly(lambda: _main(arguments))


def _main(arguments: list[str]) -> int:
    if arguments[:1] == ["compare"]:
        return compare_main(arguments[1:])
    end_with_parent()
    options = parse_options(arguments)
    if options.nproc and not started_here():
        return _start_ranks(options, arguments)
    if not under_launcher():
        return _misused("run it under torchrun, or with --nproc N")
    return _run_rank(options, arguments)


def _start_ranks(options: Options, arguments: list[str]) -> int:
    if under_torchrun():
        how = "torchrun has started the ranks already; leave --nproc out"
        return _misused(how, is_heard=os.environ.get("RANK") == "0")
    if wrong := _wrong_files(options):
        return _misused(wrong)
    return run_ranks(["-m", "mycoll.bench", *arguments], options.nproc)


def _wrong_files(options: Options) -> str:
    """What stands against the files that rank 0 will write; '' where nothing does."""
    if options.plot:
        from mycoll.bench.plot import undrawable

        if reason := undrawable(options.plot):
            return f"--plot: {reason}"
    for name in ("json", "csv", "plot"):
        path = getattr(options, name)
        if path and (reason := unwritable(path)):
            return f"--{name}: {reason}"
    return ""


def _misused(how: str, is_heard: bool = True) -> int:
    if is_heard:  # of many ranks, one says it
        print(f"mycoll bench: {how}", file=sys.stderr)
    return _BAD_USE


def _misuse(options: Options, world: World) -> str:
    """What stands against measuring; the same on all ranks, before minutes of it."""
    if options.root >= world.size:
        return f"no root {options.root} among {world.size} ranks"
    return world.share(_wrong_files(options) if world.rank == 0 else "")


def _run_rank(options: Options, arguments: list[str]) -> int:
    world = join(options)
    if wrong := _misuse(options, world):
        leave()
        return _misused(wrong, is_heard=world.rank == 0)
    contenders, absent = gather_contenders(options, world)
    history = History(failed=set(options.backends) - {contender.name for contender in contenders})
    peers, absent_peers, limits = gather_peers(options, world)
    contenders += peers
    record = header(options, arguments, world.size, world.hosts, world.cache_bytes)
    recorder = Recorder(
        record,
        options.json if world.rank == 0 else "",
        options.csv if world.rank == 0 else "",
    )
    for limit in limits:
        recorder.write(limit)
    try:
        with ended_when_unread():
            if world.rank == 0:
                _introduce(record, [*absent, *absent_peers], limits)
            _measure(options, world, contenders, recorder, history)
    finally:
        for contender in contenders:
            contender.close()
        recorder.close()
    if world.rank == 0 and options.plot:
        from mycoll.bench.plot import draw

        print(draw(options.plot, record, recorder.rows))
    code = world.share(_verdict(recorder, history) if world.rank == 0 else 0)
    leave()
    return code


def _verdict(recorder: Recorder, history: History) -> int:
    """The last lines, and the exit code."""
    wrong = sum(row.wrong or 0 for row in recorder.rows)
    if history.failed:
        print(f"# failed: {', '.join(sorted(history.failed))}")
    print(f"# wrong elements: {wrong}" if recorder.rows else "# nothing was measured", flush=True)
    return _FAILED if wrong or history.failed or not recorder.rows else 0


def _introduce(
    record: dict[str, object], absent: list[str], limits: list[dict[str, object]]
) -> None:
    machine, versions = record["machine"], record["versions"]
    assert isinstance(machine, dict) and isinstance(versions, dict)
    print(f"# mycoll bench {record['date']}  {machine['cpu']}, {machine['usable_cores']} cores")
    print("# " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    for line in absent:
        print(f"# left out: {line}")
    for limit in limits:
        print(f"# {limit['name']}: {limit['gigabytes_per_second']:.2f} GB/s ({limit['what']})")
    sys.stdout.flush()


def _measure(
    options: Options,
    world: World,
    contenders: Sequence[Contender],
    recorder: Recorder,
    history: History,
) -> None:
    work = [(op, case) for op in options.operations if op != "init" for case in cases(options, op)]
    shown = ""
    with Progress(len(work), world.rank == 0 and "NO_COLOR" not in os.environ) as progress:
        for op, case in work:
            progress.begin(case.title)
            measurement = Measurement(case, contenders, world, options, history)
            rows = measurement.run()
            progress.hide()
            if world.rank == 0:
                if op != shown:
                    print(table_header(op, world.size))
                shown = op
                for row in rows:
                    recorder.add(row)
                    print(table_line(row), flush=True)
                for note in measurement.notes:
                    print(f"# {case.title}: {note}", flush=True)
    if "init" in options.operations:
        if world.rank == 0:
            _measure_startup(options, world, recorder, history)
        world.barrier()


def _measure_startup(options: Options, world: World, recorder: Recorder, history: History) -> None:
    print(table_header("init", world.size).replace("(B)", "(r)").replace("size", "rnks"))
    if world.hosts > 1:
        print("# init: all processes start on this host", flush=True)
    rows, failures = measure_startup(options, world.local_size)
    for row in rows:
        recorder.add(row)
        print(table_line(row), flush=True)
    for name, failure in failures:
        history.failed.add(name)
        print(f"# init: {name} {failure}", flush=True)
