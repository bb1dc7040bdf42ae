"""Ctrl-C, fork, exit, small /dev/shm, restarts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from worlds.worker import Ctx

from faults.harness import Outcome, Seen, Skip, Stage, attempt, fates

CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
SHM = Path("/dev/shm")
STORM = Path(__file__).with_name("storm.py")
RESTARTS = int(os.environ.get("SOAK_RESTARTS", "2"))
# Other programs may allocate so much in the meantime. A leak of mycoll would be more than 1 MiB per
# restart.
SHARED_KIB = 64 * 1024


def tiny_shm(ctx: Ctx, size: str) -> Seen:
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(CLONE_NEWNS) != 0
        or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) != 0
        or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={size}".encode()) != 0
    ):
        raise OSError(ctypes.get_errno(), "mount")

    def action() -> int:
        ctx.init("tiny")
        wrong = 0
        for numel in (10, 100_000, 5_000_000):
            x = torch.full((numel,), float(ctx.rank))
            dist.all_reduce(x)
            wrong += not bool((x == 6.0).all())
        return wrong

    return attempt(action)


def small_shm(stage: Stage) -> Outcome:
    """/dev/shm of 1 MB."""
    if os.geteuid() != 0:
        raise Skip("mounting /dev/shm needs root")
    judge = stage.judge()
    with stage.world(4, init=False) as world:
        world.start(tiny_shm, "1m")
        found = fates(world)
        judge.fine(found)
        judge.expect(not any(s.value for s in found.values() if isinstance(s, Seen)), "wrong sums")
    return judge.outcome()


# Prints what torchrun's children have left in this network namespace.
ALONE = """
ip link set lo up || exit 97
"$@"
code=$?
echo sockets left: $(cat /proc/net/unix | grep -c mycoll) $(cat /proc/net/tcp /proc/net/tcp6 |
  grep -c ' 0A ')
exit $code
"""


def _shared_kib() -> int:
    """The shared memory of the whole machine, including memory without a name."""
    found = re.search(r"^Shmem: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def _marked(mark: str) -> dict[int, int]:
    """The processes of a storm, and the number of descriptors of each."""
    found = {}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if process.name.isdigit() and mark.encode() in (process / "environ").read_bytes():
                found[int(process.name)] = len(list((process / "fd").iterdir()))
    return found


def kill_storm(stage: Stage) -> Outcome:
    """Kill and restart under torchrun."""
    judge = stage.judge()
    mark = f"FAULTS_STORM={os.getpid()}-{time.monotonic_ns()}"
    shm, shared = set(SHM.iterdir()), _shared_kib()
    env = dict(os.environ, OMP_NUM_THREADS="1", FAULTS_BACKEND=stage.family)
    env.update(FAULTS_STORM=mark.split("=")[1], FAULTS_RESTARTS=str(RESTARTS))
    if stage.transport:
        env["MYCOLL_TRANSPORT"] = stage.transport
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4",
               f"--max-restarts={RESTARTS}", "--monitor-interval=0.1", str(STORM)]  # fmt: skip
    is_alone = os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip")
    if is_alone:
        command = ["unshare", "--net", "sh", "-c", ALONE, "sh", *command]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        run = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        descriptors: dict[int, list[int]] = {}  # by process
        while run.poll() is None and time.monotonic() < began + 120 + 20 * RESTARTS:
            time.sleep(1.0)
            for pid, count in _marked(mark).items():
                descriptors.setdefault(pid, []).append(count)
        if run.poll() is None:
            judge.expect(False, "torchrun did not end")
            for pid in _marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        code = run.wait()
        log.seek(0)
        output = log.read()
    judge.notes.append(f"{RESTARTS} restarts in {time.monotonic() - began:.0f} s")
    judge.expect(code == 0, f"torchrun ended with {code}: {output[-300:]}")
    judge.expect(output.count("the end") == 4, "not all ranks of the last attempt finished")
    kills = output.count("the next rank to die")
    judge.expect(kills == RESTARTS, f"{kills} ranks were killed")
    judge.expect(set(SHM.iterdir()) <= shm, "files are left in /dev/shm")
    left = _marked(mark)
    judge.expect(not left, f"{len(left)} processes are left")
    # The longest series is torchrun's own: it must not have more descriptors at the end.
    counts = max(descriptors.values(), key=len, default=[0])
    quarter = max(1, len(counts) // 4)
    early, late = max(counts[: 2 * quarter]), max(counts[-quarter:])
    judge.expect(late <= early + 4, f"torchrun had {early} descriptors, at the end {late}")
    if is_alone:
        judge.expect("sockets left: 0 0" in output, "sockets are left: " + output[-100:])
    # Other programs on the machine have shared memory, too.
    end = time.monotonic() + 20
    while _shared_kib() > shared + SHARED_KIB and time.monotonic() < end:
        time.sleep(0.2)
    grown = _shared_kib() - shared
    judge.expect(grown <= SHARED_KIB, f"{grown} KiB more of shared memory on this machine")
    return judge.outcome()


def interrupted(ctx: Ctx, name: str) -> Seen:
    x = torch.ones(10)
    if name == "init":
        action: Callable[[], object] = lambda: ctx.init("late")  # noqa: E731
    else:
        ctx.init("interrupts")
        dist.all_reduce(x)
        action = {
            "all_reduce": lambda: dist.all_reduce(x),
            "wait": lambda: dist.all_reduce(x, async_op=True).wait(),
            "barrier": dist.barrier,
            "recv": lambda: dist.recv(x, 1),
        }[name]
    store = ctx.store(f"interrupted {name}")
    if ctx.rank:
        store.wait(["done"], timedelta(seconds=40))
        return attempt(lambda: None)
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.8, interrupt).start()
    seen = attempt(action)
    store.set("done", "")
    return Seen(seen.kind, seen.text, sent[0] if sent else seen.began, seen.ended)


def interrupts(stage: Stage) -> Outcome:
    """SIGINT in all_reduce, Work.wait, barrier, recv, init."""
    total = stage.judge()
    for name in ("all_reduce", "wait", "barrier", "recv", "init"):
        judge = stage.judge()
        with stage.world(2, 10.0, init=False) as world:
            world.start(interrupted, name)
            found = fates(world)
            judge.raised({0: found.pop(0)}, None, 0.3, kind="KeyboardInterrupt")
            judge.fine(found)
        total.slowest = max(total.slowest or 0.0, judge.slowest or 0.0)
        for text in judge.unmet:
            total.expect(False, f"{name}: {text}")
    return total.outcome()


def in_fork(ctx: Ctx) -> Seen:
    """The child writes the result of its call to a pipe. The parent's group still works."""
    x = torch.ones(10)
    dist.all_reduce(x)
    mine, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        seen = attempt(lambda: dist.all_reduce(x))
        os.write(theirs, f"{seen.seconds}\n{seen.kind}\n{seen.text}".encode()[:4000])
        os._exit(0)
    os.close(theirs)
    began = time.monotonic()
    end = began + 5
    gone = False
    while not gone and time.monotonic() < end:
        gone = os.waitpid(pid, os.WNOHANG)[0] == pid
        time.sleep(0.01)
    if not gone:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return Seen("", "the child hung", began, time.monotonic())
    seconds, kind, text = os.read(mine, 4096).decode(errors="replace").split("\n", 2)
    dist.all_reduce(x)
    return Seen(kind, text, began, began + float(seconds))


def fork(stage: Stage) -> Outcome:
    """The child of a fork uses the group."""
    judge = stage.judge()
    with stage.world(2) as world:
        world.start(in_fork)
        found = fates(world)
        judge.raised(found, None, 0.1, "fork")
    return judge.outcome()


PROGRAM = """
import sys; sys.path.insert(0, {tests!r})
import time, torch, torch.distributed as dist
from datetime import timedelta
if {family!r} == "mycoll": import mycoll
rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", {port}, is_master=False)
dist.init_process_group({family!r}, store=dist.PrefixStore({name!r}, store), rank=rank,
                        world_size=2, timeout=timedelta(seconds=20))
x = torch.ones(10); dist.all_reduce(x)
if {send} and rank == 0: work = dist.isend(torch.full(({numel},), 7.0), 1)
if {send} and rank == 1:
    time.sleep(0.5); got = torch.zeros({numel})
    try: dist.recv(got, 0); print("delivered" if (got == 7.0).all() else "wrong", flush=True)
    except Exception as error: print("lost:", error, flush=True)
print("leaving", time.monotonic(), flush=True)
"""


def _programs(stage: Stage, send: bool, numel: int = 1000) -> list[tuple[int, float, str]]:
    """Runs PROGRAM on two ranks. Returns the exit code of each, the seconds from its last line to
    its end, and its output."""
    text = PROGRAM.format(
        tests=str(Path(__file__).resolve().parents[1]),
        family=stage.family,
        port=stage.pool.store_port,
        name=f"leave-{time.monotonic()}",
        send=send,
        numel=numel,
    )
    env = dict(os.environ, OMP_NUM_THREADS="1")
    if stage.transport:
        env["MYCOLL_TRANSPORT"] = stage.transport
    ranks = []
    for rank in (0, 1):
        command = [sys.executable, "-c", text, str(rank)]
        ranks.append(
            subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    ends: list[float] = [0.0, 0.0]
    limit = time.monotonic() + 60
    while not all(ends) and time.monotonic() < limit:
        for rank, process in enumerate(ranks):
            if not ends[rank] and process.poll() is not None:
                ends[rank] = time.monotonic()
        time.sleep(0.02)
    found = []
    for rank, process in enumerate(ranks):
        process.kill()
        output = process.communicate()[0]
        last = [line for line in output.splitlines() if line.startswith("leaving ")]
        seconds = ends[rank] - float(last[0].split()[1]) if last and ends[rank] else 99.0
        found.append((process.returncode, seconds, output))
    return found


def exit_without_destroy(stage: Stage) -> Outcome:
    """A program ends without destroy_process_group."""
    judge = stage.judge()
    for rank, (code, seconds, output) in enumerate(_programs(stage, False)):
        judge.expect(code == 0, f"rank {rank} ended with {code}: {output[-200:]}")
        judge.took(f"rank {rank}'s exit", seconds, 2.0)
    return judge.outcome()


def exit_with_send(stage: Stage) -> Outcome:
    """A program ends with an isend pending; the receiver comes later."""
    judge = stage.judge()
    for numel in (1000, 1_000_000):
        ranks = _programs(stage, True, numel)
        for rank, (code, seconds, output) in enumerate(ranks):
            judge.expect(code == 0, f"{numel}: rank {rank} ended with {code}: {output[-200:]}")
            judge.took(f"{numel}: rank {rank}'s exit", seconds, 2.5)
        got = "delivered" in ranks[1][2]
        warned = "pending" in ranks[0][2] or "not delivered" in ranks[0][2]
        judge.expect(got or warned, f"{numel} elements: lost without a warning")
        judge.notes.append(f"{numel} elements: {'delivered' if got else 'lost'}")
        if not got:
            judge.sample = judge.sample or ranks[1][2].strip()
    return judge.outcome()
