"""Tests mycoll on CUDA, and writes a dated page of results to benchmarks/results: a smoke test of
twelve steps in at most 90 seconds (smoke.py, also `./dev gpu smoke`), the CPU time of calls and
benchmarks beside torch's nccl, and all tests of device tensors. `./dev gpu` builds first."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from mycoll._gloo import keep_names_honest
from standins import cuda as standin_cuda
from worlds import device as devices

from gpu import smoke
from gpu.evidence import drop_silent, nccl_log
from gpu.page import LEFT_OUT, Result, write_page

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# The features that most programs need come first.
FIRST = ("streams", "training", "capture", "messages", "contexts")
SUITE = [
    *(f"tests/test_device_{name}.py" for name in FIRST),
    "tests/gpu",
    *(
        str(file.relative_to(ROOT))
        for file in sorted(ROOT.glob("tests/test_device_*.py"))
        if file.stem.removeprefix("test_device_") not in FIRST
    ),
]
OPERATIONS = "all_reduce,all_gather,reduce_scatter,broadcast,all_to_all,sendrecv,barrier"

_SECONDS_TO_START = 15  # for ranks, until they measure
_SECONDS_TO_END = 15  # for torchrun and pytest, after SIGINT or SIGTERM


@dataclass
class Plan:
    device: str
    folder: Path
    stem: str  # of the files that are written
    quick: bool
    ends: float = math.inf  # when all steps must be done, by time.monotonic()
    results: list[Result] = field(default_factory=list)

    @property
    def left(self) -> float:
        return self.ends - time.monotonic() - 2 * _SECONDS_TO_END

    @property
    def page(self) -> Path:
        return self.folder / f"{self.stem}.md"

    def write(self) -> None:
        """Called after every step, because later ones may never complete."""
        write_page(self.page, self.device, self.results)

    @property
    def worlds(self) -> list[int]:
        """The sizes of worlds to measure: one rank, two, and one for each device."""
        count = torch.cuda.device_count() if self.device == "cuda" else 2
        return sorted({1, 2, count})


def run(
    plan: Plan,
    name: str,
    command: list[str],
    seconds: float,
    rows: Path | None = None,
    environment: dict[str, str] | None = None,
    shows: bool = False,
) -> None:
    """Runs a step in its own processes. If it fails, its output and NCCL's log are kept. rows: the
    file of its results. shows: print its output while it runs."""
    left = plan.left
    if left <= 0:
        plan.results.append(Result(name, LEFT_OUT, 0.0, []))
        plan.write()
        print(f"--- {name}: {plan.results[-1].verdict}", flush=True)
        return
    print(f"--- {name}", flush=True)
    words = f"{plan.stem}-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}"
    log = plan.folder / f"{words}.log"
    logs = (
        {} if shows else dict(nccl_log(plan.folder, f"{words}-nccl"))
    )  # the smoke test has its own log
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
            env={**os.environ, **logs, **(environment or {})},
        )
        shower = Shower(log) if shows else None
        try:
            code = process.wait(max(1.0, min(seconds, left)))
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
            # torchrun's workers have their own sessions, so only torchrun can end them. And pytest
            # prints a summary.
            for ending in (signal.SIGINT, signal.SIGTERM):
                process.send_signal(ending)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_SECONDS_TO_END)
                    break
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if shower:
                shower.end()
    lines = log.read_text(errors="replace").splitlines()
    result = Result(name, code, time.monotonic() - began, lines, log.name if code else "")
    if rows is not None and rows.exists():
        result.rows = rows.name
    if code == 0:
        for each in plan.folder.glob(f"{words}-nccl-*.log"):
            each.unlink()
    else:
        drop_silent(plan.folder, f"{words}-nccl")
    plan.results.append(result)
    plan.write()
    if not shows:
        print("\n".join(lines[-12:] if code == 0 else lines[-60:]), flush=True)
    print(f"--- {name}: {result.verdict} after {result.seconds:.0f} s", flush=True)
    if code == 0:
        log.unlink()


class Shower:
    """Prints a file while it is written."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._body)
        self._thread.start()

    def end(self) -> None:
        self._ends.set()
        self._thread.join()

    def _body(self) -> None:
        with self._file.open(errors="replace") as file:
            is_last = False
            while True:
                print(file.read(), end="", flush=True)
                if is_last:
                    return
                is_last = self._ends.wait(0.2)


def smoke_test(plan: Plan) -> bool:
    """Returns False if nothing works, so that the other steps are pointless."""
    folder = plan.folder / f"{plan.stem}-smoke"
    command = [sys.executable, "-m", "gpu", "smoke", "--device", plan.device]
    command += ["--folder", str(folder)]
    run(plan, "smoke", command, 150, shows=True)
    code = plan.results[-1].code
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()
    return code != smoke.STOPPED


def tests(plan: Plan, words: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-v", "--device", plan.device, *SUITE, *words]
    run(plan, "tests", command, 3600)


def benchmarks(plan: Plan, seconds: float) -> None:
    """Measures each world over each path that it supports, the largest first; over NCCL beside
    torch's nccl."""
    pairs = [
        (size, path)
        for size in reversed(plan.worlds)
        for path in [*devices.paths(plan.device, size, ["nccl"]), "host"]
        if not (path == "host" and size == 1) and not devices.missing(plan.device, path)
    ]
    ends = time.monotonic() + seconds
    for done, (size, path) in enumerate(pairs):
        measure(plan, size, path, (ends - time.monotonic()) / (len(pairs) - done))


def launcher(size: int) -> list[str]:
    """torchrun with an explicit address, because the name of a host may not resolve."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--local-addr", "127.0.0.1", "--nproc-per-node", str(size)]


def cpu_time(plan: Plan, seconds: float) -> None:
    """Measures beside torch's nccl, if each rank has a GPU. In a rehearsal on idle stand-ins: with
    calls that take no time, and with an estimate of real ones."""
    if plan.device != "cuda":
        return
    costs = ["0,0", "700,5000"] if standin_cuda.is_here() else [""]
    for size in plan.worlds:
        if devices.paths("cuda", size, ["nccl"]) != ["nccl"]:
            continue
        for cost in costs:
            command = [*launcher(size), "-m", "worlds.program", "cuda", "nccl", "gpu.cpu_time"]
            most = max(2.0, min(30.0, seconds - _SECONDS_TO_START))
            command += ["2" if plan.quick else f"{most:.0f}"]
            name = f"CPU time, {size} ranks{f', idle, {cost}' if cost else ''}"
            run(
                plan,
                name,
                command,
                min(300, seconds),
                environment={"STANDIN_IDLE": cost} if cost else None,
            )


def measure(plan: Plan, size: int, path: str, seconds: float) -> None:
    rivals = "mycoll,nccl" if path != "host" and plan.device == "cuda" else "mycoll"
    # Ranks that share a GPU alternate on it, so large sizes would be slow.
    most = "64M" if path == "nccl" else "4M"
    rows = plan.folder / f"{plan.stem}-{size}x{path}.jsonl"
    command = [*launcher(size), "-m", "worlds.program", plan.device, path]
    command += ["mycoll", "bench", OPERATIONS, "--device", plan.device, "--backend", rivals]
    command += ["-b", "8", "-e", "1K" if plan.quick else most, "-f", "32", "--json", str(rows)]
    if plan.quick:
        command += ["-n", "2", "-w", "1", "--rounds", "2"]
    elif path.startswith("nccl-") or seconds < 60 or standin_cuda.is_here():
        command += ["--rounds", "4"]
    run(plan, f"benchmark, {size} ranks by {path}", command, min(300, seconds), rows)


def rehearse() -> None:
    """Restarts this program with the stand-ins instead of CUDA's runtime and NCCL."""
    if not (torch.version.cuda or "").startswith("13."):
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        sys.exit(
            f"mycoll: a rehearsal needs a torch that is built for CUDA 13, and {torch.__version__} "
            f"is built {built}: use another interpreter, ./dev gpu --rehearse --python PATH"
        )
    if not standin_cuda.is_here():
        os.environ["LD_PRELOAD"] = standin_cuda.preload()
        os.execv(sys.executable, [sys.executable, "-m", "gpu", *sys.argv[1:]])


def main() -> int:
    keep_names_honest("./dev gpu")
    if sys.argv[1:2] == ["smoke"]:
        if "--rehearse" in sys.argv:
            rehearse()
        return smoke.main(sys.argv[2:])
    parser = argparse.ArgumentParser("./dev gpu", description=__doc__)
    parts = ["smoke", "tests", "cpu", "benchmarks"]
    parser.add_argument("--only", choices=parts, help="run only this part")
    parser.add_argument(
        "--quick", action="store_true", help="tiny benchmarks, to check that they run"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="a limit for all parts together; steps without time are left out",
    )
    parser.add_argument(
        "--folder", type=Path, help="the folder of the page (benchmarks/results, build/rehearsal)"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run without a GPU, on stand-ins of CUDA's runtime and NCCL; needs torch for CUDA 13",
    )
    parser.add_argument(
        "--device",
        choices=["cuda", "standin"],
        default="cuda",
        help="standin: to test this program",
    )
    args, words = parser.parse_known_args()  # other arguments are for pytest
    if args.rehearse:
        rehearse()
    args.folder = args.folder or (ROOT / "build" / "rehearsal" if args.rehearse else RESULTS)
    args.folder.mkdir(parents=True, exist_ok=True)
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    what = "standin"
    if args.device == "cuda":
        name = torch.cuda.get_device_name(0).replace("NVIDIA", "").lower()
        what = f"{torch.cuda.device_count()}x{re.sub('[^a-z0-9]+', '', name)}"
    ends = time.monotonic() + args.seconds
    plan = Plan(args.device, args.folder, f"{today}-{what}", args.quick, ends)
    wanted = [args.only] if args.only else ["smoke", "cpu", "benchmarks", "tests"]
    if "smoke" in wanted and not smoke_test(plan):
        wanted = []
        print("the rest is left out, because nothing works")
    # A sixth of the time, then a third of the rest; the tests get what remains.
    if "cpu" in wanted:
        cpu_time(plan, plan.left / (6 if len(wanted) > 1 else 1))
    if "benchmarks" in wanted:
        benchmarks(plan, plan.left / (3 if len(wanted) > 1 else 1))
    if "tests" in wanted:
        tests(plan, words)
    print(f"written to {plan.page}")
    return 1 if any(result.code for result in plan.results) else 0


if __name__ == "__main__":
    sys.exit(main())
