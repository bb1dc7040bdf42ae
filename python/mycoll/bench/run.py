"""A rank of `mycoll bench`: from the options to the rows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from mycoll._gloo import variables_that_rename
from mycoll._terminal import Progress, note, paint
from mycoll._units import show_seconds
from mycoll.bench.contenders import Contender, gather_contenders
from mycoll.bench.options import Options
from mycoll.bench.plot import draw
from mycoll.bench.report import misused, table_header, table_line, unwritable, wrong_files
from mycoll.bench.result import LEGEND, Row
from mycoll.bench.rounds import History, Measurement, cases
from mycoll.bench.world import World, header, join, missing_device

DEFAULT_PLOT = "mycoll-bench.png"
Gather = Callable[[Options, World], tuple[list[Contender], list[str]]]


def run_rank(options: Options, arguments: list[str], gather: Gather | None = None) -> int:
    """Measures, as one of the ranks that a launcher has started; returns the exit code.

    Args:
        options: The cases, the backends, and how they are measured.
        arguments: The words of the command line, for the results.
        gather: Finds the contenders, and explains in a line each which are not available.
    """
    wrong = missing_device(options)
    if renaming := variables_that_rename():  # they had their effect when torch was imported
        wrong = f"compares backends by name: unset {' and '.join(renaming)}"
    if wrong:
        return misused(wrong, is_shown=os.environ.get("RANK") == "0")
    world = join(options)
    # The same on all ranks, before minutes of measuring.
    if wrong := world.share(wrong_files(options) if world.rank == 0 else ""):
        dist.destroy_process_group()
        return misused(wrong, is_shown=world.rank == 0)
    progress = Progress(world.rank == 0)
    record = header(options, arguments, world.size, world.hosts, world.cache_bytes)
    rows: list[Row] = []
    history = History()
    with ExitStack() as end:
        # Each row is written at once: an interrupted run keeps what it has.
        name = options.json if world.rank == 0 else ""
        file = end.enter_context(Path(name or os.devnull).open("w", buffering=1))
        print(json.dumps(record), file=file)
        if world.rank == 0:
            progress.hide()
            machine, versions = record["machine"], record["versions"]
            print(f"# mycoll bench, {machine['cpu']}, {machine['usable_cores']} cores")
            print("# " + ", ".join(f"{name} {each}" for name, each in versions.items()), flush=True)
            progress.show("connecting ...")
        contenders, absent = (gather or gather_contenders)(options, world)
        for contender in contenders:
            end.callback(contender.close)
        here = {contender.name for contender in contenders}
        history.failed |= set(options.backends) - here
        progress.hide()
        if world.rank == 0:
            for kind, meaning in LEGEND.items():
                if names := [each.name for each in contenders if each.kind == kind]:
                    print(f"# {', '.join(names)}: {meaning}", flush=True)
            for line in absent:
                note(f"left out: {line}")
        for row in _measure(options, world, contenders, history, progress):
            print(json.dumps(row.as_json()), file=file)
            rows.append(row)
    if world.rank == 0 and options.plot != "":
        print_plot(options.plot, record, rows)
    code = world.share(_verdict(rows, history) if world.rank == 0 else 0)
    dist.destroy_process_group()
    return code


def print_plot(path: str | None, header: Mapping[str, object], rows: Sequence[Row]) -> None:
    """Draws the rows, and prints where; without a path only if nothing prevents it."""
    file = path or DEFAULT_PLOT
    if path or not unwritable(file):
        line = draw(file, header, rows)
        if path or line.startswith("# plot: "):
            print(line)


def _verdict(rows: Sequence[Row], history: History) -> int:
    """The last lines, and the exit code."""
    wrong = sum(row.wrong or 0 for row in rows)
    if history.failed:
        print(paint(f"# failed: {', '.join(sorted(history.failed))}", "red"))
    end = f"# wrong elements: {wrong}" if rows else "# nothing was measured"
    print(paint(end, "red") if wrong or not rows else end, flush=True)
    return 1 if wrong or history.failed or not rows else 0


def step(number: int, of: int, title: str, spent: float) -> str:
    """The line that shows progress, and the time left once a case has been measured.

    Args:
        number: How many cases have been measured.
        of: How many there are.
        title: The title of the next one.
        spent: Seconds that the measured ones have taken.
    """
    about = f", about {show_seconds(spent / number * (of - number))} left" if number else ""
    return f"measuring {number + 1} of {of}: {title}{about}"


def _measure(
    options: Options,
    world: World,
    contenders: Sequence[Contender],
    history: History,
    progress: Progress,
) -> Iterator[Row]:
    """Yields the rows, on rank 0, and prints them."""
    work = [case for op in options.operations for case in cases(options, op)]
    shown, began = ("", "", ""), time.monotonic()
    for number, case in enumerate(work):
        progress.show(step(number, len(work), case.title, time.monotonic() - began))
        measurement = Measurement(case, contenders, world, options, history)
        rows = measurement.run()
        progress.hide()
        if world.rank != 0:
            continue
        for row in rows:
            if shown != (row.op, row.type, row.redop):
                print(table_header(row, options.backends[0]))
                shown = (row.op, row.type, row.redop)
            yield row
            print(table_line(row), flush=True)
        for each in measurement.notes:
            note(f"{case.title}: {each}")
