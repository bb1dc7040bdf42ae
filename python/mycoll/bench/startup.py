"""`init`: how long until a fresh job has done its first all_reduce, by world size.

Every sample is a new set of processes. The clock starts when all have imported torch.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from mycoll.bench.clock import now
from mycoll.bench.options import Options
from mycoll.bench.result import Row, compared
from mycoll.bench.stats import percentile

_SAMPLES = 6
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "MASTER_")


def world_sizes(options: Options, ranks: int) -> list[int]:
    """Those asked for, or powers of 2 up to the ranks of this host, where all processes start."""
    if options.worlds:
        return list(options.worlds)
    powers = [1 << shift for shift in range(1, 20) if 1 << shift <= ranks]
    return powers if ranks in powers else [*powers, ranks]


def measure_startup(options: Options, ranks: int) -> tuple[list[Row], list[tuple[str, str]]]:
    """Called on rank 0; starts processes of its own. Also which backends failed, and how."""
    rows: list[Row] = []
    failures: list[tuple[str, str]] = []
    samples = min(_SAMPLES, options.rounds)
    for size in world_sizes(options, ranks):
        times: dict[str, list[list[tuple[int, int]]]] = {name: [] for name in options.backends}
        for number in range(samples):
            for name in list(times)[:: 1 if number % 2 == 0 else -1]:
                try:
                    times[name].append(_sample(name.split("#")[0], size, options))
                except RuntimeError as cause:
                    failures.append((name, f"at {size} ranks: {cause}"))
                    del times[name]
        measured = [_row(name, size, taken) for name, taken in times.items()]
        rows += compared(measured, options.backends[0])
    return rows, failures


def _sample(backend: str, ranks: int, options: Options) -> list[tuple[int, int]]:
    """Of each rank: ns until init_process_group returned, and until the first result was there."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    with tempfile.TemporaryDirectory() as folder:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        files = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        command = [sys.executable, "-m", "mycoll.bench.startup", backend, options.device]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), str(store.port), str(file)],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, file in enumerate(files)
        ]
        errors: list[str] = []
        try:
            for process in processes:
                _, text = process.communicate(timeout=options.timeout_seconds)
                if process.returncode:
                    errors.append((text.strip().splitlines() or ["failed"])[-1])
        except subprocess.TimeoutExpired:
            errors.append(f"not ready after {options.timeout_seconds:g} s")
        finally:
            for process in processes:
                process.kill()
        if errors:
            raise RuntimeError(errors[0][:200])
        return [tuple(json.loads(file.read_text())) for file in files]


def _row(name: str, ranks: int, samples: list[list[tuple[int, int]]]) -> Row:
    """The time is that of the slowest rank; min and max are over ranks."""
    slowest = [max(total for _, total in sample) / 1e3 for sample in samples]
    ordered = sorted(slowest)
    every = [total / 1e3 for sample in samples for _, total in sample]
    joined = [max(joined for joined, _ in sample) / 1e3 for sample in samples]
    return Row(
        op="init",
        size=ranks,
        count=ranks,
        type="float32",
        redop="sum",
        root=-1,
        contender=name,
        contender_kind="backend",
        ranks=ranks,
        in_place=False,
        time_us=median(slowest),
        algbw=0.0,
        busbw=0.0,
        wrong=0,
        p50_us=percentile(ordered, 50),
        p95_us=percentile(ordered, 95),
        p99_us=percentile(ordered, 99),
        min_us=min(every),
        max_us=max(every),
        iterations=1,
        rounds_us=slowest,
        extra={"init_process_group_us": median(joined)},
    )


def _rank_main(backend: str, device: str, rank: int, ranks: int, port: int, file: str) -> None:
    """A rank of a sample; what it computes is verified."""
    if device != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    tensor = torch.full((1,), float(rank + 1), device=device)
    patience = datetime.timedelta(seconds=120)
    store = TCPStore("127.0.0.1", port, ranks, is_master=False, timeout=patience)
    store.add("ready", 1)
    while store.add("ready", 0) < ranks:
        pass
    begin = now()
    dist.init_process_group(
        backend,
        store=PrefixStore("init", store),
        rank=rank,
        world_size=ranks,
        timeout=patience,
    )
    joined = now()
    dist.all_reduce(tensor)
    found = float(tensor.item())
    done = now()
    if found != ranks * (ranks + 1) / 2:
        raise SystemExit(f"the first all_reduce gave {found}")
    Path(file).write_text(json.dumps([joined - begin, done - begin]))
    dist.destroy_process_group()


if __name__ == "__main__":
    name, kind, *numbers, path = sys.argv[1:]
    rank_, ranks_, port_ = map(int, numbers)
    _rank_main(name, kind, rank_, ranks_, port_, path)
