"""Hugging Face accelerate uses an existing group; otherwise it would create one of gloo."""

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator
from common import BATCH, RATE, STEPS, check, data, model, passed
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("mycoll")
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
rank = accelerator.process_index

# In the order in which accelerate distributes batches to the ranks.
parts = [data(r, step) for step in range(STEPS) for r in range(2)]
loader = DataLoader(TensorDataset(*(torch.cat(each) for each in zip(*parts))), batch_size=BATCH)
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
wrapped, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(wrapped(x), y))
    optimizer.step()
check(accelerator.unwrap_model(wrapped))

ranks = accelerator.gather(torch.tensor([rank]))
assert ranks.tolist() == [0, 1], ranks
assert accelerator.reduce(torch.tensor([1.0 + rank]), "mean").item() == 1.5
assert accelerate.utils.gather_object([rank]) == [0, 1]
accelerator.wait_for_everyone()
passed("accelerate", accelerate.__version__)
