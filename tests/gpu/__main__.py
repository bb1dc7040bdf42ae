"""All tests of device tensors on CUDA, then the benchmarks beside torch's nccl, and a dated page of
what came out in benchmarks/results. `./dev gpu` builds first."""

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
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from standins import cuda as standin_cuda
from worlds import device as devices

from gpu.page import LEFT_OUT, Result, write_page

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SUITE = ["tests/gpu", *sorted(map(str, ROOT.glob("tests/test_device_*.py")))]
OPERATIONS = "all_reduce,all_gather,reduce_scatter,broadcast,all_to_all,sendrecv,barrier,ddp"

_SECONDS_TO_END = 15  # for torchrun and pytest, when they are told to


@dataclass
class Plan:
    device: str
    folder: Path
    stem: str  # of the files that are written
    quick: bool
    ends: float = math.inf  # when all of it has to be over, by time.monotonic()
    results: list[Result] = field(default_factory=list)

    @property
    def page(self) -> Path:
        return self.folder / f"{self.stem}.md"

    def write(self) -> None:
        """After every step: what comes later may not come at all."""
        write_page(self.page, self.device, self.results)

    @property
    def worlds(self) -> list[int]:
        """What is measured: one rank, two, and one for each device; on a single GPU also four."""
        count = torch.cuda.device_count() if self.device == "cuda" else 2
        return sorted({1, 2, 4 if count == 1 else count})


def run(
    plan: Plan,
    name: str,
    command: list[str],
    seconds: float,
    rows: Path | None = None,
    environment: dict[str, str] | None = None,
) -> None:
    """A step, in processes of its own, and what it wrote to `rows`. Its output is kept where it
    failed."""
    left = plan.ends - time.monotonic() - 2 * _SECONDS_TO_END
    if left <= 0:
        plan.results.append(Result(name, LEFT_OUT, 0.0, []))
        plan.write()
        print(f"--- {name}: {plan.results[-1].verdict}", flush=True)
        return
    print(f"--- {name}", flush=True)
    log = plan.folder / f"{plan.stem}-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.log"
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            code = process.wait(min(seconds, left))
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
            # torchrun's workers are in sessions of their own: only it can end them. And pytest has
            # something to say yet.
            for ending in (signal.SIGINT, signal.SIGTERM):
                process.send_signal(ending)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_SECONDS_TO_END)
                    break
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    result = Result(name, code, time.monotonic() - began, lines, log.name if code else "")
    if rows is not None and rows.exists():
        result.rows = rows.name
    plan.results.append(result)
    plan.write()
    print("\n".join(lines[-12:] if code == 0 else lines[-60:]), flush=True)
    print(f"--- {name}: {result.verdict} after {result.seconds:.0f} s", flush=True)
    if code == 0:
        log.unlink()


def tests(plan: Plan, words: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-v", "--device", plan.device, *SUITE, *words]
    run(plan, "tests", command, 3600)


def benchmarks(plan: Plan) -> None:
    """Each world by each road that it can take; where NCCL serves, beside torch's nccl."""
    for size in plan.worlds:
        for road in [*devices.roads(plan.device, size, ["nccl"]), "host"]:
            if (road == "host" and size == 1) or devices.missing(plan.device, road):
                continue
            measure(plan, size, road)


def launcher(size: int) -> list[str]:
    """A host's own name need not resolve."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--local-addr", "127.0.0.1", "--nproc-per-node", str(size)]


def cpu_time(plan: Plan) -> None:
    """Beside torch's nccl, where a GPU serves each rank. In a rehearsal on idle stand-ins: with
    calls that cost nothing, and with such as real ones may cost (a guess)."""
    if plan.device != "cuda":
        return
    costs = ["0,0", "700,5000"] if standin_cuda.is_here() else [""]
    for size in plan.worlds:
        if devices.roads("cuda", size, ["nccl"]) != ["nccl"]:
            continue
        for cost in costs:
            command = [*launcher(size), "-m", "worlds.program", "cuda", "nccl", "gpu.cpu_time"]
            command += ["2" if plan.quick else "30"]
            name = f"CPU time, {size} ranks{f', idle, {cost}' if cost else ''}"
            run(plan, name, command, 300, environment={"STANDIN_IDLE": cost} if cost else None)


def measure(plan: Plan, size: int, road: str) -> None:
    rivals = "mycoll,nccl" if road != "host" and plan.device == "cuda" else "mycoll"
    # Ranks that share a GPU take turns on it: large sizes would only take long.
    most = "64M" if road == "nccl" else "4M"
    rows = plan.folder / f"{plan.stem}-{size}x{road}.jsonl"
    command = [*launcher(size), "-m", "worlds.program", plan.device, road]
    command += ["mycoll.bench", OPERATIONS, "--device", plan.device, "--backend", rivals]
    command += ["-b", "8", "-e", "1K" if plan.quick else most, "-f", "32", "--json", str(rows)]
    if plan.quick:
        command += ["-n", "2", "-w", "1", "--rounds", "2"]
    elif road.startswith("nccl-"):
        command += ["--rounds", "4"]
    run(plan, f"benchmark, {size} ranks by {road}", command, 300, rows)


def main() -> int:
    parser = argparse.ArgumentParser("./dev gpu", description=__doc__)
    parser.add_argument("--only", choices=["tests", "cpu", "benchmarks"], help="a part of it")
    parser.add_argument("--quick", action="store_true", help="tiny benchmarks: does all of it run?")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="what is not over by then is left out"
    )
    parser.add_argument(
        "--folder", type=Path, help="where the page goes (benchmarks/results, build/rehearsal)"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="without a GPU: torch must be built for CUDA 13, whose runtime and NCCL are stand-ins",
    )
    parser.add_argument(
        "--device", choices=["cuda", "standin"], default="cuda", help="standin: to try this program"
    )
    args, words = parser.parse_known_args()  # the rest is pytest's
    if args.rehearse and not (torch.version.cuda or "").startswith("13."):
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        sys.exit(
            f"mycoll: a rehearsal needs a torch that is built for CUDA 13, and {torch.__version__} "
            f"is built {built}: take another interpreter, ./dev gpu --rehearse --python PATH"
        )
    if args.rehearse and not standin_cuda.is_here():
        os.environ["LD_PRELOAD"] = standin_cuda.preload()
        os.execv(sys.executable, [sys.executable, "-m", "gpu", *sys.argv[1:]])
    args.folder = args.folder or (ROOT / "build" / "rehearsal" if args.rehearse else RESULTS)
    args.folder.mkdir(parents=True, exist_ok=True)
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    what = "standin"
    if args.device == "cuda":
        name = torch.cuda.get_device_name(0).replace("NVIDIA", "").lower()
        what = f"{torch.cuda.device_count()}x{re.sub('[^a-z0-9]+', '', name)}"
    ends = time.monotonic() + args.seconds
    plan = Plan(args.device, args.folder, f"{today}-{what}", args.quick, ends)
    if args.only in (None, "tests"):
        tests(plan, words)
    if args.only in (None, "cpu"):
        cpu_time(plan)
    if args.only in (None, "benchmarks"):
        benchmarks(plan)
    print(f"written to {plan.page}")
    return 1 if any(result.code for result in plan.results) else 0


if __name__ == "__main__":
    sys.exit(main())
