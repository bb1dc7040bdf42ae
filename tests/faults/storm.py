"""Run by torchrun: in each attempt but the last, one rank kills itself in the middle of a loop."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    last = int(os.environ["FAULTS_RESTARTS"])
    dist.init_process_group(os.environ["FAULTS_BACKEND"], timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    chance = random.Random(attempt)
    victim, when = chance.randrange(dist.get_world_size()), chance.randrange(1, 50)
    x = torch.ones(10_000)
    for step in range(60):
        if attempt < last and rank == victim and step == when:
            print("the next rank to die", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(x.fill_(1.0))
        time.sleep(0.002)
    dist.destroy_process_group()
    print("the end", flush=True)


if __name__ == "__main__":
    main()
