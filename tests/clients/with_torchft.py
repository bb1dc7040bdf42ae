"""torchft: each rank is a replica, whose manager creates a group for each quorum."""

from datetime import timedelta
from importlib.metadata import version

import torch
import torch.distributed as dist
from common import RATE, STEPS, check, data, model, passed
from mycoll.adapters.torchft import ProcessGroupMycoll
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer
from torchft.process_group import create_store_client

TIMEOUT = timedelta(seconds=60)

dist.init_process_group("mycoll")
rank = dist.get_rank()


def broadcast(value: str) -> str:
    items = [value]
    dist.broadcast_object_list(items, src=0)
    return items[0]


def collectives() -> None:
    """Uses the adapter without a manager, and configures it several times."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    address = broadcast(f"localhost:{store.port}")
    group = ProcessGroupMycoll(timeout=TIMEOUT)
    for quorum in range(2):
        group.configure(f"{address}/quorum{quorum}", f"replica {rank}", rank, 2)
        assert (group.size(), group.getBackendName()) == (2, "torchft-mycoll")
        x = torch.full((5,), rank + 1.0)
        group.allreduce([x], dist.AllreduceOptions()).wait()
        assert x.tolist() == [3.0] * 5
        part = torch.empty(2)
        halves = [torch.full((2,), float(rank)), torch.full((2,), 10.0)]
        group.reduce_scatter([part], [halves], dist.ReduceScatterOptions()).wait()
        assert part.tolist() == ([1.0] * 2 if rank == 0 else [20.0] * 2)
        old = group._pg
    # configure() aborts pending operations of the old group; there are none here.
    group.configure(f"{address}/alone{rank}", f"replica {rank}", 0, 1)
    assert group.size() == 1
    assert old is not group._pg
    group.shutdown()
    assert create_store_client(f"{address}/", TIMEOUT) is not None
    dist.barrier()


def train() -> torch.nn.Module:
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2) if rank == 0 else None
    address = broadcast(lighthouse.address() if lighthouse else "")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    manager = Manager(
        pg=ProcessGroupMycoll(timeout=TIMEOUT),
        load_state_dict=lambda state: net.load_state_dict(state),
        state_dict=net.state_dict,
        min_replica_size=2,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"replica{rank}",
        init_sync=False,  # all start with the same weights
        timeout=TIMEOUT,
    )
    wrapped = DistributedDataParallel(manager, net)
    managed = Optimizer(manager, optimizer)
    for step in range(STEPS):
        x, y = data(rank, step)
        managed.zero_grad()
        torch.nn.functional.mse_loss(wrapped(x), y).backward()
        managed.step()
    assert manager.current_step() == STEPS
    assert manager.num_participants() == 2
    dist.barrier()
    manager.shutdown(wait=False)
    dist.barrier()
    if lighthouse:
        lighthouse.shutdown()
    return net


collectives()
check(train())
passed("torchft", version("torchft"))
