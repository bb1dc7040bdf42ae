"""`mycoll bench`: from the command line to the rows."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from mycoll._pipes import quietly
from mycoll._terminal import Progress, paint, wrapped
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
from mycoll.bench.report import LEGEND, Recorder, table_header, table_line, unwritable
from mycoll.bench.rounds import History, Measurement, cases
from mycoll.bench.world import World, join, leave
from mycoll.replace import keep_names_honest, variables_that_rename

_FAILED = 1
_BAD_USE = 2


Gather = Callable[[Options, World], tuple[list[Contender], list[str]]]


def main(
    argv: Sequence[str] | None = None,
    program: Sequence[str] = ("-m", "mycoll.bench"),
    gather: Gather = gather_contenders,
) -> int:
    """Runs the command line.

    Args:
        argv: The words after the name of the command.
        program: The words after "python" that start a rank, in front of `argv`.
        gather: Finds the contenders, and explains in a line each which are not available.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return quietly(lambda: _main(arguments, program, gather))


def _main(arguments: list[str], program: Sequence[str], gather: Gather) -> int:
    if arguments[:1] == ["compare"]:
        return compare_main(arguments[1:])
    end_with_parent()
    options = parse_options(arguments)
    if options.nproc and not started_here():
        return _start_ranks(options, [*program, *arguments])
    if not under_launcher():
        return _misused("add --nproc N to start N ranks here, or run it under torchrun")
    return _run_rank(options, arguments, gather)


def _start_ranks(options: Options, command: list[str]) -> int:
    if under_torchrun():
        how = "torchrun has started the ranks already; leave --nproc out"
        return _misused(how, is_shown=os.environ.get("RANK") == "0")
    if wrong := _wrong_files(options):
        return _misused(wrong)
    keep_names_honest("mycoll bench")
    Progress().show(f"starting {options.nproc} ranks ...")  # rank 0 clears the line
    return run_ranks(command, options.nproc)


def _wrong_files(options: Options) -> str:
    """Why rank 0 cannot write its files; '' where it can."""
    if options.plot:
        from mycoll.bench.plot import undrawable

        if reason := undrawable(options.plot):
            return f"--plot: {reason}"
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path and (reason := unwritable(path)):
            return f"--{name}: {reason}"
    return ""


def _misused(how: str, is_shown: bool = True) -> int:
    if is_shown:  # by one of many ranks
        print(f"mycoll bench: {how}", file=sys.stderr)
    return _BAD_USE


def _run_rank(options: Options, arguments: list[str], gather: Gather) -> int:
    if renaming := variables_that_rename():  # which counted when torch was imported
        how = f"compares backends by name: unset {' and '.join(renaming)}"
        return _misused(how, is_shown=os.environ.get("RANK") == "0")
    world = join(options)
    # The same on all ranks, before minutes of measuring.
    if wrong := world.share(_wrong_files(options) if world.rank == 0 else ""):
        leave()
        return _misused(wrong, is_shown=world.rank == 0)
    progress = Progress(world.rank == 0)
    record = header(options, arguments, world.size, world.hosts, world.cache_bytes)
    recorder = Recorder(record, options.json if world.rank == 0 else "")
    contenders: list[Contender] = []
    history = History()
    try:
        with ended_when_unread():
            if world.rank == 0:
                progress.hide()
                _introduce(record)
                progress.show("connecting ...")
            contenders, absent = gather(options, world)
            here = {contender.name for contender in contenders}
            history.failed |= set(options.backends) - here
            progress.hide()
            if world.rank == 0:
                _explain(contenders, absent)
            _measure(options, world, contenders, recorder, history, progress)
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
        print(paint(f"# failed: {', '.join(sorted(history.failed))}", "red"))
    end = f"# wrong elements: {wrong}" if recorder.rows else "# nothing was measured"
    print(paint(end, "red") if wrong or not recorder.rows else end, flush=True)
    return _FAILED if wrong or history.failed or not recorder.rows else 0


def _introduce(record: dict[str, object]) -> None:
    machine, versions = record["machine"], record["versions"]
    assert isinstance(machine, dict) and isinstance(versions, dict)
    print(f"# mycoll bench, {machine['cpu']}, {machine['usable_cores']} cores")
    print("# " + ", ".join(f"{name} {version}" for name, version in versions.items()), flush=True)


def _explain(contenders: Sequence[Contender], absent: Sequence[str]) -> None:
    for kind, meaning in LEGEND.items():
        names = [contender.name for contender in contenders if contender.kind == kind]
        if names:
            print(f"# {', '.join(names)}: {meaning}")
    for line in absent:
        _note(f"left out: {line}")
    sys.stdout.flush()


def _note(text: str) -> None:
    for line in wrapped(text, 2):
        print(paint(f"# {line}", "yellow"), flush=True)


def _measure(
    options: Options,
    world: World,
    contenders: Sequence[Contender],
    recorder: Recorder,
    history: History,
    progress: Progress,
) -> None:
    work = [case for op in options.operations for case in cases(options, op)]
    shown = ("", "", "")
    for number, case in enumerate(work, 1):
        progress.show(f"measuring {number} of {len(work)}: {case.title}")
        measurement = Measurement(case, contenders, world, options, history)
        rows = measurement.run()
        progress.hide()
        if world.rank != 0:
            continue
        for row in rows:
            if shown != (row.op, row.type, row.redop):
                print(table_header(row, options.backends[0]))
                shown = (row.op, row.type, row.redop)
            recorder.add(row)
            print(table_line(row), flush=True)
        for note in measurement.notes:
            _note(f"{case.title}: {note}")
