"""A program for torchrun that kills itself, or runs until FOLDER/end exists.

python elastic.py restarts BACKEND FAILURES     each attempt but the last dies in a different way
python elastic.py members BACKEND FOLDER        records the world's sizes in FOLDER
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from worlds.smoke import smoke

PR_SET_PDEATHSIG = 1


def die_after(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def restarts(backend: str, failures: int) -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank = int(os.environ["RANK"])
    victim = attempt < failures and rank == attempt % int(os.environ["WORLD_SIZE"])
    way = attempt % 4
    if victim and way == 0:
        die_after(0.3)  # somewhere in the rendezvous or in the loop
    dist.init_process_group(backend)
    if victim and way == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # after init, before the first operation
    smoke(rank, dist.get_world_size())
    if victim and way == 2:
        sys.exit(3)  # without destroy_process_group
    if attempt < failures:
        if victim and way == 3:
            die_after(0.2)
        while True:
            dist.all_reduce(torch.ones(1000))
    group = dist.new_group([0])
    smoke(rank, dist.get_world_size())
    if rank == 0:
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    print(f"elastic: rank {rank} done in attempt {attempt}", flush=True)


def members(backend: str, folder: Path) -> None:
    dist.init_process_group(backend)
    size = dist.get_world_size()
    while True:
        end = torch.tensor(float((folder / "end").exists()))
        dist.all_reduce(end)
        (folder / f"world{size}").touch()
        if end:
            break
        time.sleep(0.05)
    smoke(dist.get_rank(), size)
    dist.destroy_process_group()


if __name__ == "__main__":
    # The test kills agents, which then cannot end their workers.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    if sys.argv[1] == "restarts":
        restarts(sys.argv[2], int(sys.argv[3]))
    else:
        members(sys.argv[2], Path(sys.argv[3]))
