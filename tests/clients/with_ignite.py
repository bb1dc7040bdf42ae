"""ignite uses an existing group; it can only create one of a backend in its list."""

import ignite
import ignite.distributed as idist
import torch
import torch.distributed as dist
from common import RATE, STEPS, check, data, model, passed
from ignite.engine import Engine, Events
from ignite.metrics import Average
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("mycoll")
rank = idist.get_rank()
assert idist.backend() == "mycoll"
assert idist.get_world_size() == 2
net = model()
# auto_model wraps a model only for the backends in its list.
assert not isinstance(idist.auto_model(net), DistributedDataParallel)
wrapped = DistributedDataParallel(net)
optimizer = idist.auto_optim(torch.optim.SGD(net.parameters(), lr=RATE))


def update(_engine, step: int) -> float:
    optimizer.zero_grad()
    x, y = data(rank, step)
    loss = torch.nn.functional.mse_loss(wrapped(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


trainer = Engine(update)
average = Average()
average.attach(trainer, "loss")
sums = []
trainer.add_event_handler(
    Events.ITERATION_COMPLETED, lambda: sums.append(idist.all_reduce(1.0 + rank))
)
trainer.run(range(STEPS), max_epochs=1)
assert sums == [3.0] * STEPS
losses = idist.all_gather(trainer.state.metrics["loss"])
assert losses[0] == losses[1]
assert idist.broadcast("word" if rank == 0 else None, src=0, safe_mode=True) == "word"
idist.barrier()
check(net)
passed("ignite", ignite.__version__)
