"""Finds traces: what processes wrote of their last operations (csrc/observe/trace_file.h)."""

from __future__ import annotations

import os
from pathlib import Path

from mycoll import black_box
from mycoll.black_box import Process, TraceError


def default_folder() -> Path:
    """The folder that processes write to by default. It has a folder for each job."""
    return Path(f"/tmp/mycoll-{os.geteuid()}")


def load(paths: list[Path]) -> tuple[list[Process], list[str]]:
    """Files, folders with a file for each rank, or folders of such folders, of which the latest is
    taken; by rank. And what could not be read: that one rank's file is bad is no reason to say
    nothing about the others."""
    processes: list[Process] = []
    problems: list[str] = []
    for path in paths:
        try:
            files = traces_in(path) if path.is_dir() else [path]
        except OSError as error:
            problems.append(f"{path} cannot be read: {error}")
            continue
        if not files:
            problems.append(f"no traces in {path}")
        for file in files:
            try:
                processes.append(black_box.load(file))
            except TraceError as error:
                problems.append(str(error))
    return sorted(processes, key=lambda each: each.rank), problems


def traces_in(folder: Path) -> list[Path]:
    """Other files may lie beside them; one that is named as a trace and is none is worth a word,
    unless there is nothing else."""
    files = sorted(each for each in folder.iterdir() if each.is_file())
    traces = [each for each in files if is_trace(each)]
    if traces:
        return [each for each in files if each in traces or each.name.startswith("rank_")]
    jobs = [found for each in folder.iterdir() if each.is_dir() and (found := direct(each))]
    return max(jobs, key=age, default=[])


def direct(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if each.is_file() and is_trace(each))
    except OSError:
        return []


def age(traces: list[Path]) -> float:
    return max(each.stat().st_mtime for each in traces)


def is_trace(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(black_box.MAGIC)) == black_box.MAGIC
    except OSError:
        return False
