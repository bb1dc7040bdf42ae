"""MPIs as contenders of `mycoll bench`: a C program without torch, in the same rounds.

Rank 0 of the harness starts mpiexec once. The MPI ranks connect to its unix socket and wait in
read() for commands, a line each. The other ranks of the harness sleep in a barrier meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from mpi_build import PeerAbsent, build, environment, launch_command
from mycoll._leaving import described
from mycoll.bench.arena import plan
from mycoll.bench.contenders import Contender, gather_contenders
from mycoll.bench.options import Options
from mycoll.bench.workload import Unsupported, Workload
from mycoll.bench.world import World

_START_SECONDS = 30.0
_QUIT_SECONDS = 5.0


class MpiContender(Contender):
    """Only rank 0 communicates with the MPI. On other ranks this does nothing."""

    def __init__(self, name: str, world: World, options: Options) -> None:
        super().__init__(name, "peer", world)
        self._options = options
        self._channels: list[TextIO] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._died = ""
        self.library = ""

    def start(self, folder: Path) -> None:
        """Rank 0 only. Raises PeerAbsent with the reason."""
        binary = build(self.name, folder)
        address = str(folder / f"{self.name}.socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(self.world.size)
            listener.settimeout(_START_SECONDS)
            with (folder / f"{self.name}.log").open("wb") as log:
                self._process = subprocess.Popen(
                    [*launch_command(self.name, self.world.size), str(binary), address],
                    env=environment(self.name),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            by_rank: dict[int, TextIO] = {}
            try:
                for _ in range(self.world.size):
                    connection, _ = listener.accept()
                    connection.settimeout(self._options.timeout_seconds)
                    channel = connection.makefile("rw")
                    hello = json.loads(channel.readline())
                    by_rank[hello["rank"]] = channel
                    self.library = hello["library"]
            except (OSError, ValueError) as cause:
                self.close()
                output = (folder / f"{self.name}.log").read_text(errors="replace").split("\n")
                reason = next((line for line in output if line.strip(" -")), str(cause))
                raise PeerAbsent(f"its ranks did not start: {reason}") from cause
        self._channels = [by_rank[rank] for rank in sorted(by_rank)]

    def prepare(self, workload: Workload) -> None:
        if self._died:
            raise Unsupported(self._died)
        case = workload.case
        windows, evict_bytes = plan(
            workload.touched_bytes, self.world, self._options.hot, workload.busy_ranks
        )
        self._ask(
            f"prepare {case.op} {case.dtype_name} {case.redop} {workload.size} {case.root} "
            f"{windows} {evict_bytes}"
        )

    def verify(self, seed: int) -> int | None:
        counts = [answer["wrong"] for answer in self._ask(f"verify {seed}")]
        return sum(counts) if counts and None not in counts else None

    def run(self, warmups: int, iterations: int) -> list[list[int]]:
        self.world.barrier()
        answers, trouble = [], ""
        try:
            answers = self._ask(f"run {warmups} {iterations}")
        except Unsupported as cause:
            trouble = str(cause)
        if trouble := self.world.share(trouble):
            raise Unsupported(trouble)
        return [answer["ns"] for answer in answers]

    def _ask(self, line: str) -> list[dict[str, Any]]:
        """Sends a command to all ranks of the MPI, and returns their answers; none except on rank
        0."""
        try:
            for channel in self._channels:
                channel.write(line + "\n")
                channel.flush()
            answers = [json.loads(channel.readline()) for channel in self._channels]
        except (OSError, ValueError) as cause:
            self.close()
            self._died = f"its ranks died or hung in '{line}': {described(cause)}"
            raise Unsupported(self._died) from cause
        for answer in answers:
            if "unsupported" in answer:
                raise Unsupported(answer["unsupported"])
        return answers

    def close(self) -> None:
        for channel in self._channels:
            try:
                channel.write("quit\n")
                channel.close()
            except OSError:
                pass
        self._channels = []
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(_QUIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def gather(
    names: Sequence[str], options: Options, world: World
) -> tuple[list[Contender], list[str]]:
    """Returns the contenders of `mycoll bench` and these MPIs, and a line for each missing one."""
    found, absent = gather_contenders(options, world)
    for name in names:
        reason = ""
        contender: MpiContender | None = None
        try:
            if world.hosts > 1:
                raise PeerAbsent("peers are measured on one host only")
            contender = MpiContender(name, world, options)
            if world.rank == 0:
                with tempfile.TemporaryDirectory(prefix="mycoll-bench-") as folder:
                    contender.start(Path(folder))
        except PeerAbsent as cause:
            reason = str(cause)
        except (OSError, subprocess.SubprocessError) as cause:
            reason = described(cause)
        reasons = [text for text in world.gather_all(reason) if text]
        if reasons or contender is None:
            absent.append(f"{name}: {reasons[0]}")
        else:
            found.append(contender)
    return found, absent
