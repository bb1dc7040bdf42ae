"""torchft's nightly: each rank is a replica with one group for all quorums. Between two steps a
replica is replaced by a new one, which copies the weights."""

from datetime import timedelta
from importlib.metadata import version

import mycoll
import torch
import torch.distributed as dist
from common import RATE, STEPS, check, data, model, passed
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer

TIMEOUT = timedelta(seconds=60)

dist.init_process_group("mycoll")
rank = dist.get_rank()
lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=100)
addresses = [lighthouse.address()]
dist.broadcast_object_list(addresses, src=0)
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


class Replica:
    def __init__(self) -> None:
        self.net = model()
        self.group = mycoll.process_group(
            dist.HashStore(), 0, 1, timeout=TIMEOUT, enable_reconfigure=True
        )
        self.manager = Manager(
            pg=self.group,
            load_state_dict=lambda state: self.net.load_state_dict(state),
            state_dict=self.net.state_dict,
            min_replica_size=2,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=store.port,
            lighthouse_addr=addresses[0],
            replica_id=f"replica{rank}",
            init_sync=False,  # all start with the same weights
            use_async_quorum=False,  # the new replica takes part in the same step
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
        )
        self.wrapped = DistributedDataParallel(self.manager, self.net)
        self.optimizer = Optimizer(self.manager, torch.optim.SGD(self.net.parameters(), lr=RATE))

    def train(self, steps: range) -> None:
        for step in steps:
            x, y = data(rank, step)
            self.optimizer.zero_grad()
            torch.nn.functional.mse_loss(self.wrapped(x), y).backward()
            self.optimizer.step()
            assert self.manager.current_step() == step + 1
            assert self.manager.num_participants() == self.group.size() == 2

    def end(self) -> None:
        self.manager.shutdown(wait=False)
        self.group.shutdown()


replica = Replica()
replica.train(range(STEPS // 2))
if rank == 1:
    replica.end()
    replica = Replica()
replica.train(range(STEPS // 2, STEPS))
dist.barrier()
replica.end()
check(replica.net)
dist.barrier()
lighthouse.shutdown()
passed("torchft-nightly", version("torchft-nightly"))
