"""./dev gpu smoke: checks in at most 90 seconds whether mycoll works on these GPUs. Prints a line
for each of twelve steps. A step that fails is repeated over torch's own nccl as a control (on the
stand-in device over host memory), to show whether the fault is mycoll's.

It needs one GPU, and uses as many ranks as there are GPUs, up to eight. On a single one it checks
once whether torch's nccl supports two ranks there. If not, it continues with one rank, and runs the
steps that need two through host memory.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import mycoll
import torch
from standins import cuda as standin_cuda
from worlds import device as devices
from worlds.pool import Options, Pool, Spec, World, WorldFailure
from worlds.worker import Ctx

from gpu import steps
from gpu.evidence import drop_silent, nccl_log, nccl_warnings
from gpu.leaving import LATE
from gpu.steps import Found

ROOT = Path(__file__).resolve().parents[2]
SHOWN = 8  # lines of a failure; the whole text is in the folder
STOPPED = 2  # the exit code where the first three steps failed
NO_CONTROL_FOR_DEATHS = "no control: torch's nccl ends the surviving processes"


@dataclass(frozen=True)
class Step:
    name: str
    job: Callable[[Ctx], Found] | None  # on all ranks; None: programs that end by themselves
    needs_two: bool = False
    no_control: str = ""  # why there is none


STEPS = (
    Step(
        "library and version",
        steps.library,
        no_control="no control: torch's nccl has its own version",
    ),
    Step("init", steps.init),
    Step("results", steps.same_results),
    Step("asynchronous, on streams", steps.streams),
    Step("DDP", steps.ddp),
    Step("FSDP2", steps.fsdp2),
    Step("messages", steps.messages, needs_two=True),
    Step("capture and replay", steps.capture),
    Step("contexts on each GPU", steps.contexts),
    Step("call time, bandwidth", steps.speed),
    Step("a killed rank", steps.killed, needs_two=True, no_control=NO_CONTROL_FOR_DEATHS),
    Step("late destroy, and none", None),
)


class Failed(Exception):
    """A program has failed, as the text explains."""


class Smoke:
    def __init__(self, device: str, folder: Path, seconds: float) -> None:
        self.device = device
        self.folder = folder
        self.ends = time.monotonic() + seconds
        self.most = seconds / 2.5  # for one step
        self.pool = Pool(Options(deadline=self.most))
        self.spec = self.pool.spec(1)
        self.names = itertools.count()

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    def settle(self, ranks: int | None) -> str:
        """Chooses the world, and returns a line about it."""
        count = torch.cuda.device_count() if self.device == "cuda" else 2
        size = ranks or min(max(count, 2), 8)
        paths = devices.paths(self.device, size, ["nccl"])
        path = next((each for each in reversed(paths) if not self.missing(each)), paths[0])
        self.spec = self.pool.spec(
            size, device=self.device, path=path, timeout=25.0, env=tuple(nccl_log(self.folder))
        )
        if size <= count:
            return f"{size} ranks, a GPU each" if size > 1 else "one rank"
        # Ranks that share a GPU. NCCL refuses that, unless its check can be disabled.
        control = self.control(self.spec)
        try:
            self.in_world(control, steps.init)
        except WorldFailure as failure:
            (self.folder / "several-ranks-on-one-gpu.log").write_text(str(failure))
            self.spec = replace(self.spec, size=1, path="nccl")
            return (
                f"torch's nccl does not support {size} ranks on one GPU here "
                "(several-ranks-on-one-gpu.log): using one rank, for which NCCL launches no "
                "kernel, and host memory for the steps that need two"
            )
        finally:
            self.end(control)
        return f"{size} ranks on {count} GPU ({path}: torch's nccl supports that here)"

    def missing(self, path: str) -> str:
        return devices.missing(self.device, path)

    def control(self, spec: Spec) -> Spec:
        if self.device == "cuda":
            return replace(spec, backend="cpu:gloo,cuda:nccl")
        return replace(spec, path="host")

    def beside(self) -> str:
        return "torch's nccl" if self.device == "cuda" else "host memory"

    def in_world(self, spec: Spec, job: Callable[[Ctx], Found]) -> Found:
        seconds = max(1.0, min(self.most, self.left))
        self.pool.options.deadline = seconds
        world: World = self.pool.get(spec)
        if job is not steps.killed:
            answers = world.run(job, deadline=seconds)
        else:
            world.start(job)
            answers = world.finish(seconds, allow_gone=True)
            world.kill()
        found: Found = answers[0]
        return found

    def end(self, spec: Spec) -> None:
        """Kills the ranks, which would hold memory and might hang on the device."""
        if world := self.pool.worlds.pop(spec, None):
            world.kill()

    def programs(self, spec: Spec) -> Found:
        """Runs ranks as programs, for their exit codes."""
        prefix = f"leaving{next(self.names)}"
        command = [sys.executable, "-m", "worlds.program", spec.device, spec.path, "gpu.leaving"]
        command += [spec.backend, str(self.pool.store_port), prefix]
        seconds = max(1.0, min(self.most, self.left))
        running, texts, slow = [], [], []
        for rank in range(spec.size):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(spec.size)}
            environment = {**os.environ, **dict(spec.env), **place}
            log = (self.folder / f"{prefix}-rank{rank}.log").open("w+")
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
            )
            running.append((process, log))
        until = time.monotonic() + seconds
        for rank, (process, log) in enumerate(running):
            with log:
                try:
                    code: int | str = process.wait(max(0.1, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    code = f"none after {seconds:.0f} s"
                    process.kill()
                    process.wait()
                ended = time.monotonic()
                log.seek(0)
                output = log.read()
            found = re.search(r"ends at ([\d.]+)", output)
            if code != 0 or not found:
                texts.append(f"rank {rank}: exit code {code}\n{output[-2000:]}")
            else:
                slow.append(ended - float(found[1]))
                lines = [line for line in output.splitlines() if "mycoll" in line]
                texts += [f"rank {rank} succeeded, but printed: {line}" for line in lines]
        if texts:
            raise Failed("\n".join(texts))
        text = f"left {LATE:.0f} s apart; without destroy: exit code 0, {max(slow):.1f} s to end"
        return Found(text)

    def do(self, step: Step, spec: Spec) -> Found:
        return self.programs(spec) if step.job is None else self.in_world(spec, step.job)

    def run(self, number: int, step: Step) -> Found | None:
        """Runs a step, and prints its line and its failure. Returns None if it failed."""
        print(f"{number:2}  {step.name:26}", end="", flush=True)
        if self.left < 3:
            print("red        there was no time left", flush=True)
            return None
        spec, by = self.spec, ""
        if step.needs_two and spec.size == 1:
            spec, by = replace(spec, size=2, path="host"), ", through host memory"
        began = time.monotonic()
        try:
            found = self.do(step, spec)
        except (WorldFailure, Failed) as failure:
            self.explain(number, step, spec, str(failure), time.monotonic() - began)
            return None
        word = "ok " if found.is_tried else "-- "
        print(f"{word} {time.monotonic() - began:5.1f} s  {found.text}{by}", flush=True)
        return found

    def explain(self, number: int, step: Step, spec: Spec, text: str, took: float) -> None:
        log = self.folder / f"{number:02}-{re.sub('[^a-z0-9]+', '-', step.name.lower())}.log"
        log.write_text(text)
        print(f"red {took:5.1f} s  the whole text: {log}", flush=True)
        for line in itertools.islice(lines_of(text), SHOWN):
            print(f"      {line[:200]}")
        for line in nccl_warnings(self.folder):
            print(f"      NCCL: {line[:200]}")
        print(f"      {self.verdict(step, spec)}", flush=True)

    def verdict(self, step: Step, spec: Spec) -> str:
        """Runs the control, and returns a line about it."""
        if step.no_control:
            return step.no_control
        if spec.path == "host":
            return "no control: the step used host memory"
        if self.left < 5:
            return f"no control: there was no time left to run it over {self.beside()}"
        control = self.control(spec)
        try:
            found = self.do(step, control)
        except (WorldFailure, Failed) as failure:
            last = list(lines_of(str(failure)))[-1:]
            return f"control: it also fails over {self.beside()}: {''.join(last)[:160]}"
        finally:
            self.end(control)
        if not found.is_tried:
            return f"no control: {found.text}"
        place = "mycoll" if self.device == "cuda" else "mycoll's use of NCCL, or in NCCL"
        return f"control: over {self.beside()} it passes, so the fault is in {place}"


def lines_of(failure: str) -> Iterator[str]:
    """The lines of a WorldFailure that name the ranks and their errors, without stacks and
    output."""
    for line in failure.splitlines():
        if line.startswith(("--- its output", "--- native stacks")):
            return
        is_frame = line.startswith(("  File ", "    "))
        if line.strip() and not is_frame:
            yield line


def chosen(words: str) -> list[int]:
    """The steps of "2,5" or "ddp,messages"."""
    found = []
    for word in words.lower().split(","):
        hits = [
            number
            for number, step in enumerate(STEPS, 1)
            if word == str(number) or (not word.isdigit() and word in step.name.lower())
        ]
        if not hits:
            sys.exit(f"mycoll: there is no step '{word}'; steps are 1 to {len(STEPS)}")
        found += hits
    return sorted(set(found))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("./dev gpu smoke", description=__doc__)
    parser.add_argument("--seconds", type=float, default=90, help="a limit for all steps (90)")
    parser.add_argument("--only", default="", help="numbers or names of steps: 2,7 or ddp")
    parser.add_argument(
        "--ranks", type=int, help="the number of ranks (one for each GPU, up to eight)"
    )
    parser.add_argument("--folder", type=Path, help="the folder for logs of failures (build/smoke)")
    parser.add_argument("--rehearse", action="store_true", help="run without a GPU, on stand-ins")
    parser.add_argument("--device", choices=["cuda", "standin"], default="cuda")
    args = parser.parse_args(arguments)
    wanted = chosen(args.only) if args.only else list(range(1, len(STEPS) + 1))
    folder = args.folder or ROOT / "build" / "smoke"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.log"):
        old.unlink()
    smoke = Smoke(args.device, folder.resolve(), args.seconds)
    began = time.monotonic()
    what = "the stand-in device" if args.device == "standin" else torch.cuda.get_device_name(0)
    if standin_cuda.is_here():
        what += ", a rehearsal without a GPU"
    print(f"mycoll {mycoll.__version__}, torch {torch.__version__}, {what}", flush=True)
    try:
        print(smoke.settle(args.ranks), flush=True)
        return run_all(smoke, wanted, began)
    finally:
        smoke.pool.close()
        drop_silent(smoke.folder)


def run_all(smoke: Smoke, wanted: list[int], began: float) -> int:
    good, untried = 0, 0
    for done, number in enumerate(wanted):
        found = smoke.run(number, STEPS[number - 1])
        good += found is not None
        untried += found is not None and not found.is_tried
        if done == 2 and number == 3 and good == 0:
            print("0 of 12: the first three steps failed, and the others need them")
            return STOPPED
    note = f", of which {untried} cannot be tried here (--)" if untried else ""
    print(f"{good} of {len(wanted)}{note}, in {time.monotonic() - began:.0f} s")
    return 0 if good == len(wanted) else 1
