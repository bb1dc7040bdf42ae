"""Lightning Fabric accepts any name of a backend."""

import lightning
import torch
import torch.distributed as dist
from common import RATE, STEPS, check, data, model, passed
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy

fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="mycoll"))
fabric.launch()
net = model()
wrapped, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=RATE))
for step in range(STEPS):
    optimizer.zero_grad()
    x, y = data(fabric.global_rank, step)
    fabric.backward(torch.nn.functional.mse_loss(wrapped(x), y))
    optimizer.step()
check(net)

rank = fabric.global_rank
assert fabric.all_reduce(torch.tensor(1.0 + rank), reduce_op="mean").item() == 1.5
assert fabric.all_reduce(torch.tensor(3 + rank), reduce_op="sum").item() == 7  # integers
assert fabric.all_gather(torch.tensor([rank])).flatten().tolist() == [0, 1]
assert fabric.broadcast({"from": rank}) == {"from": 0}
fabric.barrier()
assert dist.get_backend() == "mycoll"
passed("lightning (Fabric)", lightning.__version__)
