"""DeepSpeed accepts any name of a backend: python with_deepspeed.py STAGE BACKEND. The result is
compared with gloo's."""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])

import deepspeed
import torch
import torch.distributed as dist
from common import BATCH, RATE, STEPS, data, model, passed

# DeepSpeed's own all_reduce for inference, which would take minutes to compile.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
stage = int(sys.argv[1])
deepspeed.init_distributed(dist_backend=sys.argv[2], auto_mpi_discovery=False)
assert dist.get_backend() == sys.argv[2]
net = model()
engine, _, _, _ = deepspeed.initialize(
    model=net,
    optimizer=torch.optim.SGD(net.parameters(), lr=RATE),
    config={
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    },
)
for step in range(STEPS):
    x, y = data(dist.get_rank(), step)
    engine.backward(torch.nn.functional.mse_loss(engine(x), y))
    engine.step()
with deepspeed.zero.GatheredParameters(list(net.parameters()), enabled=stage == 3):
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
everyone = [torch.empty_like(weights) for _ in range(2)]
dist.all_gather(everyone, weights)
assert torch.equal(everyone[0], everyone[1])
if dist.get_rank() == 0:
    print(f"weights: {weights.double().norm():.5f} {weights.double().sum():.4f}", flush=True)
passed(f"deepspeed (ZeRO {stage})", deepspeed.__version__)
