"""DistributedDataParallel with checkpoints, and a job that continues after a crash.

torchrun --nproc-per-node 2 --max-restarts 1 examples/ddp_restart.py --folder /tmp/run --crash-at 25

With --crash-at, rank 1 kills itself in that step of the first attempt. torchrun stops the others
and restarts all ranks, which load the checkpoint.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0 writes, because all ranks have the same state. The rename makes the write atomic."""
    if dist.get_rank() == 0:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    dist.barrier()  # no rank continues before the checkpoint is complete


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the checkpoint, if there is one, and returns the step to start with."""
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoint")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--crash-at", type=int, default=-1)
    options = parser.parse_args()

    dist.init_process_group("mycoll")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpoint = options.folder / "checkpoint.pt"
    begin = load(checkpoint, model, optimizer)
    parallel = DistributedDataParallel(model)  # averages gradients while backward() runs

    rank, attempt = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if rank == 0:
        print(f"attempt {attempt} starts at step {begin}", flush=True)
    for step in range(begin, options.steps):
        if step == options.crash_at and attempt == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        # Each step and rank has its own batch, which is the same after a restart.
        random = torch.Generator().manual_seed(1000 * step + rank)
        data = torch.randn(64, 8, generator=random)
        loss = nn.functional.mse_loss(parallel(data), data.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 10 == 0:
            save(checkpoint, step + 1, model, optimizer)
    if rank == 0:
        weights = sum(parameter.double().sum().item() for parameter in model.parameters())
        print(f"done: step {options.steps}, sum of weights {weights:.12f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
