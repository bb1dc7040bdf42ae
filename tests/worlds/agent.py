"""python -m worlds.agent RESTARTS PROGRAM [ARGUMENTS]: torchrun's agent with two workers, which are
forked from a process that has imported torch: each begins after milliseconds, not after seconds.
What torchrun itself starts is in test_launchers.py and test_elastic.py."""

from __future__ import annotations

import multiprocessing
import runpy
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from worlds.pool import PRELOAD


def work(program: str, *arguments: str) -> None:
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


def main() -> None:
    restarts, program, *arguments = sys.argv[1:]
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
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
    elastic_launch(config, work)(program, *arguments)


if __name__ == "__main__":
    main()
