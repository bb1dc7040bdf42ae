"""Random programs of several groups in which a rank is killed, aborts, leaves, calls a different
operation or makes no call. No rank gets a wrong result or waits for too long, every rank of an
affected group gets an error that names the rank, and other groups continue.

To repeat a run: `pytest tests/test_device_endings.py --seed N`.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from worlds import device as devices
from worlds.worker import Ctx

SEEDS = int(os.environ.get("ENDING_SEEDS", "0"))  # of each kind; 0: the default number
PATIENCE = timedelta(seconds=40)
SHORT = timedelta(seconds=3)  # the timeout of a group that detects the failure only by it
SOON = 20.0  # seconds until each rank has raised an error
ENDINGS = ("kill", "abort", "leave", "odd", "miss")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "ring", "pair")
NUMELS = (1, 100, 5000, 70_000)
LAST = 10_000  # elements of the last calls; no other call has this number


@dataclass(frozen=True)
class Step:
    group: int
    kind: str
    numel: int
    is_async: bool
    root: int  # an index into the group's members
    settles: int  # the number of works that may remain pending afterwards


@dataclass(frozen=True)
class Script:
    """The same for all ranks."""

    ending: str
    culprit: int
    at: int  # the step that the failure replaces
    groups: list[list[int]]
    steps: list[Step]

    @staticmethod
    def of(seed: int, size: int, ending: str) -> Script:
        rng = random.Random(seed)
        groups = [list(range(size))]
        for _ in range(rng.randint(1, 2)):
            groups.append(sorted(rng.sample(range(size), rng.randint(2, size))))
        steps = []
        for _ in range(rng.randint(6, 25)):
            group = rng.randrange(len(groups))
            steps.append(
                Step(
                    group,
                    rng.choice(KINDS),
                    rng.choice(NUMELS),
                    rng.random() < 0.5,
                    rng.randrange(len(groups[group])),
                    rng.choice((0, 0, 3, 9)),
                )
            )
        # The world group fails only in endings that affect all groups or a single call.
        fit = [at for at, step in enumerate(steps) if step.group or ending in ("kill", "odd")]
        if ending == "odd":  # the sizes of an all_to_all are known to pairs of ranks only
            fit = [at for at in fit if steps[at].kind not in ("ring", "pair", "all_to_all")]
        if not fit:
            steps.append(Step(1, "all_reduce", 100, False, 0, 0))
            fit = [len(steps) - 1]
        at = rng.choice(fit)
        return Script(ending, rng.choice(groups[steps[at].group]), at, groups, steps)

    def is_hit(self, group: int) -> bool:
        if self.ending == "kill":
            return self.culprit in self.groups[group]
        return group == self.steps[self.at].group


@dataclass
class Report:
    """The results of a rank."""

    errors: dict[int, str] = field(default_factory=dict)  # by group: the first error
    took: dict[int, float] = field(default_factory=dict)  # since its last call that succeeded
    disturbed: set[int] = field(default_factory=set)  # groups that raised another's error
    wrong: list[str] = field(default_factory=list)  # wrong results
    again: str = ""  # what was wrong in the new group


class Player:
    def __init__(self, ctx: Ctx, script: Script) -> None:
        self.ctx, self.script, self.report = ctx, script, Report()
        self.pending: list[tuple[int, str, dist.Work | None, torch.Tensor | None, float]] = []
        self.groups: list[dist.ProcessGroup | None] = [dist.group.WORLD]
        for index, members in enumerate(script.groups[1:], 1):
            # Over NCCL, a message of a rank that has left may still arrive.
            late = ("miss", "leave") if ctx.setup.path == "nccl" else ("miss",)
            is_short = script.ending in late and script.is_hit(index)
            self.groups.append(dist.new_group(members, timeout=SHORT if is_short else PATIENCE))
        self.names = {
            dist.distributed_c10d._get_process_group_name(group): index
            for index, group in enumerate(self.groups)
            if ctx.rank in script.groups[index]
        }
        for index in self.mine():
            self.call(Step(index, "all_reduce", 1, False, 0, 0), "the first call")
        dist.barrier()
        self.last_good = time.monotonic()

    def mine(self) -> list[int]:
        """The groups that this rank still uses."""
        return [
            index
            for index, members in enumerate(self.script.groups)
            if self.ctx.rank in members
            and index not in self.report.errors
            and index not in self.report.disturbed
        ]

    def play(self) -> Report:
        script, rank = self.script, self.ctx.rank
        for at, step in enumerate(script.steps):
            is_end = at == script.at and rank == script.culprit
            if is_end and script.ending == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if step.group not in self.mine():
                continue
            what = f"step {at}: {step}"
            if is_end:
                self.guarded(step.group, lambda step=step: self.end(step))
            else:
                self.guarded(step.group, lambda step=step, what=what: self.call(step, what))
            self.guarded(step.group, lambda most=step.settles: self.settle(most))
        self.guarded(0, lambda: self.settle(0))
        for index in self.mine():
            last = Step(index, "all_reduce", LAST, False, 0, 0)
            self.guarded(index, lambda last=last: self.call(last, "the last call"))
            self.guarded(index, self.synchronize)
        self.guarded(0, lambda: self.settle(0))
        return self.report

    def guarded(self, group: int, act: Callable[[], None]) -> None:
        """Records an error, which may be raised anywhere, also while another one is recorded."""
        self.recording(group, lambda: self.recording(group, act))

    def recording(self, group: int, act: Callable[[], None]) -> None:
        try:
            act()
            self.last_good = time.monotonic()
        except dist.DistBackendError as error:
            self.record(group, str(error))

    def record(self, group: int, text: str) -> None:
        """An error belongs to the group that it names, whichever group this rank was using."""
        named = re.search(r"mycoll group '([^' ]+)", text)
        found = self.names.get(named[1], group) if named else group
        self.report.errors.setdefault(found, text)
        self.report.took.setdefault(found, time.monotonic() - self.last_good)
        if found != group and group in self.mine():
            self.report.disturbed.add(group)
            self.abort(group)

    def abort(self, group: int) -> None:
        self.groups[group]._get_backend(self.ctx.device).abort()

    def end(self, step: Step) -> None:
        ending = self.script.ending
        if ending == "abort":
            self.abort(step.group)
        elif ending == "leave":
            dist.destroy_process_group(self.groups[step.group])
        elif ending == "odd":
            odd = Step(step.group, step.kind, step.numel + 3, step.is_async, step.root, 0)
            self.call(odd, "the odd call", is_checked=False)
            return
        self.report.disturbed.add(step.group)  # this rank does not use it again

    def synchronize(self) -> None:
        if self.ctx.device.type != "cpu":
            torch.accelerator.synchronize()

    def full(self, numel: int, value: float) -> torch.Tensor:
        return torch.full((numel,), float(value), device=self.ctx.device)

    def settle(self, most: int) -> None:
        while len(self.pending) > most:
            group, what, work, out, want = self.pending.pop(0)
            hits = self.script.is_hit
            knows = hits(group) and any(hits(each) for each in self.report.errors)
            # The results are invalid: also those of a call that this rank had not waited for when
            # another group reported the same death.
            if group not in self.mine() or (knows and work is None):
                out = None
            self.guarded(group, lambda w=work, o=out, v=want, s=what: self.check(s, w, o, v))

    def check(
        self, what: str, work: dist.Work | None, out: torch.Tensor | None, want: float
    ) -> None:
        if work is not None:
            work.wait()
        if out is None:
            return
        low, high = out.min().item(), out.max().item()
        if (low, high) != (want, want):
            self.report.wrong.append(f"{what}: {low} to {high}, not {want}")

    def call(self, step: Step, what: str, is_checked: bool = True) -> None:
        group, members = self.groups[step.group], self.script.groups[step.group]
        size, me = len(members), members.index(self.ctx.rank)
        total, n = float(sum(range(1, size + 1))), step.numel
        mine = self.full(n, me + 1)
        work: dist.Work | None = None
        out: torch.Tensor | None = None
        want = 0.0
        how = {"group": group, "async_op": step.is_async}
        if step.kind == "all_reduce":
            out, want = mine, total
            work = dist.all_reduce(out, **how)
        elif step.kind == "all_gather":
            gathered = self.full(n * size, 0)
            work = dist.all_gather_into_tensor(gathered, mine, **how)
            out, want = gathered[-n:], size
        elif step.kind == "reduce_scatter":
            out, want = self.full(n, 0), total
            work = dist.reduce_scatter_tensor(out, self.full(n * size, me + 1), **how)
        elif step.kind == "broadcast":
            out, want = mine, step.root + 1
            work = dist.broadcast(out, members[step.root], **how)
        elif step.kind == "all_to_all":
            exchanged = self.full(n * size, 0)
            work = dist.all_to_all_single(exchanged, self.full(n * size, me + 1), **how)
            out, want = exchanged[-n:], size
        elif step.kind == "ring":
            right, left = members[(me + 1) % size], members[(me - 1) % size]
            out, want = self.full(n, 0), (me - 1) % size + 1
            ops = [
                dist.P2POp(dist.isend, mine, right, group),
                dist.P2POp(dist.irecv, out, left, group),
            ]
            works = dist.batch_isend_irecv(ops)
            for each in works[:-1]:
                self.pending.append((step.group, what, each, None, 0.0))
            work = works[-1]
        elif me in (step.root, (step.root + 1) % size):
            peer = (step.root + 1) % size if me == step.root else step.root
            if me == step.root:
                work = dist.isend(mine, members[peer], group)
            else:
                out, want = self.full(n, 0), peer + 1
                work = dist.irecv(out, members[peer], group)
        self.pending.append((step.group, what, work, out if is_checked else None, want))


def again(ctx: Ctx, script: Script) -> str:
    """Destroys all groups and makes a new one of the ranks that are alive."""
    for _ in range(len(script.groups) + 1):
        try:
            dist.destroy_process_group()
            break
        except dist.DistBackendError:
            continue  # each group may raise its error once
    alive = [r for r in range(ctx.size) if not (script.ending == "kill" and r == script.culprit)]
    dist.init_process_group(
        ctx.backend,
        store=ctx.store("again"),
        rank=alive.index(ctx.rank),
        world_size=len(alive),
        timeout=PATIENCE,
    )
    x = torch.ones(1000, device=ctx.device)
    dist.all_reduce(x)
    text = "" if x.max().item() == len(alive) else f"again: {x.max().item()}"
    dist.destroy_process_group()
    return text


def played(ctx: Ctx, script: Script) -> Report:
    ctx.init(timeout=PATIENCE)
    report = Player(ctx, script).play()
    report.again = again(ctx, script)
    return report


def judge(script: Script, reports: list[Report | None], is_nccl: bool) -> None:
    disturbed = {g for report in reports if report for g in report.disturbed}
    expected = {"odd": "MISMATCH", "miss": "timed out"}.get(script.ending, "")
    for rank, report in enumerate(reports):
        if report is None:
            assert (script.ending, script.culprit) == ("kill", rank), f"rank {rank} is gone"
            continue
        # NCCL may execute calls that differ; an error follows.
        if not (is_nccl and script.ending == "odd"):
            assert not report.wrong, f"rank {rank}: {report.wrong}"
        assert not report.again, f"rank {rank}: {report.again}"
        for index, members in enumerate(script.groups):
            if rank not in members or (rank == script.culprit and script.ending != "odd"):
                continue
            if index in report.disturbed:  # not called again
                continue
            text = report.errors.get(index, "")
            # The rank that makes no call may wait for the others in another group, or have left.
            other = re.search("DEADLOCK|has left the group", text)
            is_known = script.ending == "miss" and other is not None
            if not script.is_hit(index):
                is_fine = not text or index in disturbed or is_known
                assert is_fine, f"rank {rank}, group {index}: {text}"
                continue
            assert text, f"rank {rank} got no error of group {index}"
            assert expected in text or is_known, f"rank {rank}, group {index}: {text}"
            # Other ranks leave because one has left, and may be named instead.
            culprits = members if script.ending == "leave" else [script.culprit]
            names = {f"rank {each}" for r in culprits for each in (r, members.index(r))}
            is_named = any(re.search(rf"\b{name}\b", text) for name in names)
            assert is_named, f"rank {rank}, group {index} does not name {names}: {text}"
            took = report.took[index]
            assert took < SOON, f"rank {rank} got its error after {took:.1f} s: {text}"


def seeds(config: pytest.Config) -> list[int]:
    only = config.getoption("--seed")
    count = SEEDS or (1 if config.getoption("--device") == "cuda" else 3)
    return list(range(count)) if only is None else [only]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("path", ["nccl", "host", "cpu"])
def test_affected_ranks_get_an_error(request, pool, path, ending):
    kind = request.config.getoption("--device")
    for seed in seeds(request.config):
        size = 2 + seed % 3
        script = Script.of(seed, size, ending)
        if path == "cpu":
            spec = pool.spec(size, ("shm", "tcp")[seed % 2], init=False)
        else:
            taken = devices.paths(kind, size, [path])[0]
            if reason := devices.missing(kind, taken):
                pytest.skip(reason)
            # A rank that makes no further call keeps a thread of another rank inside NCCL, and so
            # does a rank that does not leave the group, for 10 s.
            env = (("STANDIN_NCCL", "one_thread=0"),)
            spec = pool.spec(size, device=kind, path=taken, init=False, env=env)
        world = pool.fresh(spec)
        try:
            world.start(played, script)
            reports = world.finish(allow_gone=ending == "kill")
            judge(script, reports, path == "nccl")
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {script}\n{error}") from None
        finally:
            world.kill()
