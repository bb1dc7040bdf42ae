"""A pipeline: each rank has a part of the layers, and works on one microbatch while the next rank
works on the previous one.

torchrun --nproc-per-node 2 examples/pipeline.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH, MICROBATCHES, STEPS = 16, 4, 20


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, dims=1).tanh() / 2


def in_a_pipeline(rank: int, size: int) -> float:
    mine = layers(size)[rank]
    stage = PipelineStage(mine, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.5)
    losses: list[torch.Tensor] = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        losses = []
        # The first stage gets the input, the last one the target.
        inputs = [x] if rank == 0 else []
        wanted = {"target": y, "losses": losses} if rank == size - 1 else {}
        schedule.step(*inputs, **wanted)
        optimizer.step()
    last = torch.stack(losses).mean() if losses else torch.zeros(())
    dist.broadcast(last, src=size - 1)
    return last.item()


def in_one_process(size: int) -> float:
    model = nn.Sequential(*layers(size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = torch.zeros(())
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    dist.init_process_group("mycoll")
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = {"pipeline": in_a_pipeline(rank, size), "one process": in_one_process(size)}
    if rank == 0:
        print(losses)
    assert abs(losses["pipeline"] - losses["one process"]) < 1e-4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
