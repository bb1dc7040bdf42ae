"""python -m worlds.program DEVICE PATH gpu.leaving BACKEND PORT PREFIX: a rank that destroys one
group later than the others, and then exits without destroying the next one."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

LATE = 2.0  # seconds


def main() -> None:
    backend, port, prefix = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    device = torch.device(accelerator.type, rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False)

    def join(name: str) -> None:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"{prefix}/{name}", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=30),
        )
        x = torch.ones(1000, device=device)
        dist.all_reduce(x)
        if x[-1].item() != size:
            sys.exit(f"rank {rank}: all_reduce gave {x[-1].item()}, not {size}")

    join("late")
    if rank != 0:
        time.sleep(LATE)
    dist.destroy_process_group()
    join("without")
    print(f"ends at {time.monotonic()}", flush=True)


if __name__ == "__main__":
    main()
