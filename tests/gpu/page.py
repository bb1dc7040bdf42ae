"""Writes the page of `./dev gpu`: the machine, the outcome of each step, and the measurements."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import mycoll
import torch
from mycoll.bench.report import ratio, read_results
from mycoll.bench.result import Row
from standins import cuda as standin_cuda
from worlds.device import nccl_version

LEFT_OUT = 1000  # larger than any exit code
ANSI = r"\x1b\[[0-9;]*m"


@dataclass
class Result:
    name: str
    code: int
    seconds: float
    lines: list[str]
    log: str = ""  # the file of its whole output
    rows: str = ""  # the file of its measurements

    @property
    def verdict(self) -> str:
        if self.code == 0:
            return "passed"
        if self.code == -signal.SIGKILL:
            return "STOPPED: took too long"
        if self.code == LEFT_OUT:
            return "left out, because there was no time for it"
        return f"FAILED (exit code {self.code})"


def machine(device: str) -> Iterator[str]:
    python = platform.python_version()
    yield f"mycoll {mycoll.__version__}, torch {torch.__version__}, Python {python}"
    if standin_cuda.is_here():
        yield "a rehearsal without a GPU: times of the device are meaningless"
    if device == "cuda":
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            yield f"GPU {index}: {found.name}, {found.total_memory >> 30} GiB"
        code = nccl_version()
        yield f"NCCL {code // 10000}.{code // 100 % 100}.{code % 100}, CUDA {torch.version.cuda}"
        preloaded = os.environ.get("LD_PRELOAD")
        if preloaded:
            yield f"LD_PRELOAD: {preloaded}"
        yield from driver()
        preset = [name for name in sorted(os.environ) if name.startswith(("NCCL_", "CUDA_"))]
        yield from (f"{name}={os.environ[name]}" for name in preset)
    else:
        yield f"no GPU: the stand-in device ({device}), whose times are meaningless"
    yield f"{os.cpu_count()} CPU cores, {platform.platform()}"


@functools.cache
def driver() -> tuple[str, ...]:
    """Facts from nvidia-smi, if that is installed."""
    if not shutil.which("nvidia-smi"):
        return ()

    def output(*words: str) -> list[str]:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True)
        return done.stdout.splitlines() if done.returncode == 0 else []

    def of_each(field: str) -> str:
        return ", ".join(dict.fromkeys(output(f"--query-gpu={field}", "--format=csv,noheader")))

    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return (
        f"driver {of_each('driver_version') or 'unknown'}",
        f"MIG: {of_each('mig.mode.current') or 'unknown'}",
        f"MPS: {f'a server at {pipes}' if (pipes / 'control').exists() else 'none'}",
        *(f"`{re.sub(ANSI, '', line)}`" for line in takewhile(str.strip, output("topo", "-m"))),
    )


def summary(result: Result) -> Iterator[str]:
    """Tables of the output, or pytest's last line and the tests in its summary."""
    tables = [line for line in result.lines if line.startswith("|")]
    if tables:
        yield from (*tables, "")
    if result.name == "smoke":
        yield from (f"    {line}" for line in result.lines)
        return
    named = [line for line in result.lines if line.startswith(("FAILED ", "ERROR ", "SKIPPED "))]
    yield from (f"    {line[:200]}" for line in named)
    yield from (f"    {line.strip('= ')}" for line in result.lines[-1:])


def table(rows: list[Row]) -> Iterator[str]:
    """A line for each case; times in microseconds, the rival's as a multiple of mycoll's."""
    yield "| operation | bytes | mycoll, GPU us | CPU us | nccl, GPU | nccl, CPU us |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        if row.contender != "mycoll":
            continue
        rival = next(
            (
                r
                for r in rows
                if r.contender == "nccl"
                and (r.op, r.size, r.type, r.redop) == (row.op, row.size, row.type, row.redop)
            ),
            None,
        )
        cells = [row.op, str(row.size), f"{row.time_us:.1f}", f"{row.extra.get('cpu_us', 0):.1f}"]
        if rival is None or rival.ratio is None:
            cells += ["", ""]
        else:
            cells += [ratio(rival), f"{rival.extra.get('cpu_us', 0):.1f}"]
        yield f"| {' | '.join(cells)} |"


def write_page(page: Path, device: str, results: list[Result]) -> None:
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    lines = [f"# ./dev gpu, {today}", "", *(f"- {line}" for line in machine(device)), ""]
    for result in results:
        kept = f"; see `{result.log}`" if result.log else ""
        lines += [f"## {result.name}: {result.verdict}", "", f"{result.seconds:.0f} s{kept}", ""]
        if result.rows:
            try:
                lines += [*table(read_results(str(page.parent / result.rows))[1]), ""]
            except ValueError as broken:  # the step was stopped while it wrote
                lines += [f"{broken}", ""]
            lines += [f"All measurements: `{result.rows}`", ""]
        else:
            lines += [*summary(result), ""]
    page.write_text("\n".join(lines))
