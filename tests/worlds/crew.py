"""Processes that are started, commanded and killed one by one: ranks of groups that change.

    def double(pipe):                   # in the process
        pipe.send(2 * pipe.recv())

    with Crew() as crew:
        number = crew.start(double)
        crew.send(number, 21)
        assert crew.receive(number) == 42

They are forked from a server that has imported torch, so each one starts in milliseconds."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from worlds import servers

PATIENCE = 120.0


def begin(pipe: Connection, environment: dict[str, str], program: bytes) -> None:
    os.environ.clear()  # inherited from the server
    os.environ.update(environment)
    run, arguments = pickle.loads(program)  # imports the program's modules
    run(pipe, *arguments)


class Crew:
    """The living processes, by number. All are killed at the end of the context."""

    def __init__(self) -> None:
        self._context = servers.context()
        self._living: dict[int, tuple[ForkServerProcess, Connection]] = {}
        self._started = 0

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(self.living)

    @property
    def living(self) -> list[int]:
        return list(self._living)

    def start(self, program: Callable[..., None], *arguments: Any, **environment: str) -> int:
        """A new process runs program(pipe, *arguments), with these variables added."""
        here, there = self._context.Pipe()
        pickled = pickle.dumps((program, arguments))
        process = self._context.Process(
            target=begin, args=(there, {**os.environ, **environment}, pickled), daemon=True
        )
        process.start()
        there.close()
        self._living[self._started] = (process, here)
        self._started += 1
        return self._started - 1

    def send(self, number: int, message: Any) -> None:
        self._living[number][1].send(message)

    def receive(self, number: int) -> Any:
        pipe = self._living[number][1]
        assert pipe.poll(PATIENCE), f"nothing from process {number}"
        return pipe.recv()

    def signal(self, number: int, which: int) -> None:
        pid = self._living[number][0].pid
        assert pid is not None
        os.kill(pid, which)

    def kill(self, numbers: Sequence[int]) -> None:
        """Kills the processes, which may have ended before, and waits until they have ended."""
        for number in numbers:
            self._living[number][0].kill()
        for number in numbers:
            process, pipe = self._living.pop(number)
            process.join()
            pipe.close()

    def join(self, number: int) -> None:
        """Waits until the process exits, without an error."""
        process, pipe = self._living.pop(number)
        process.join(PATIENCE)
        pipe.close()
        assert process.exitcode == 0
