"""Checkpoint of a sharded model: each rank writes its part, and any number of ranks can load it.

torchrun --nproc-per-node 2 examples/checkpoint.py --folder /tmp/run --steps 10
torchrun --nproc-per-node 1 examples/checkpoint.py --folder /tmp/run --steps 20     # continues
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WHOLE_BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoint")
    parser.add_argument("--steps", type=int, default=10, help="train up to this step")
    options = parser.parse_args()

    dist.init_process_group("mycoll")
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    begin = 0
    if (options.folder / ".metadata").exists():
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=options.folder)  # each rank reads what its shards need
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"]
        )
        begin = state["step"]
    if rank == 0:
        print(f"{size} ranks start at step {begin}", flush=True)
    for step in range(begin, options.steps):
        # The batch does not depend on the number of ranks; each rank has a part of it.
        random = torch.Generator().manual_seed(step)
        data = torch.randn(WHOLE_BATCH, 8, generator=random).tensor_split(size)[rank]
        loss = nn.functional.mse_loss(model(data), data.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    weights, moments = get_state_dict(model, optimizer)
    # To save while training continues: dcp.async_save(..., process_group=dist.new_group()).
    dcp.save(
        {"model": weights, "optimizer": moments, "step": options.steps},
        checkpoint_id=options.folder,
    )
    total = sum(p.detach().full_tensor().double().sum().item() for p in model.parameters())
    if rank == 0:
        print(f"done: step {options.steps}, sum of weights {total:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
