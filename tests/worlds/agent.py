"""python -m worlds.agent RESTARTS PROGRAM [ARGUMENTS]: runs torchrun's agent with two workers that
are forked from a process that has imported torch, so that they start in milliseconds.
test_launchers.py and test_elastic.py test torchrun itself."""

from __future__ import annotations

import os
import runpy
import sys

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from worlds import servers


def work(agent: int, environment: dict[str, str], program: str, *arguments: str) -> None:
    for name, value in environment.items():  # the server has another environment, and other files
        os.environ.setdefault(name, value)
    for fd in (1, 2):
        os.dup2(os.open(f"/proc/{agent}/fd/{fd}", os.O_WRONLY | os.O_APPEND), fd)
    torch.set_num_threads(1)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


def main() -> None:
    restarts, program, *arguments = sys.argv[1:]
    servers.context()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="restarts",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=int(restarts),
        monitor_interval=0.1,
        start_method="forkserver",
    )
    elastic_launch(config, work)(os.getpid(), dict(os.environ), program, *arguments)


if __name__ == "__main__":
    main()
