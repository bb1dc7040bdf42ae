"""Groups of device tensors over the host half of NVIDIA's NCCL (tests/standins/host_nccl): what
NCCL does to connect, split, abort and end is real, its kernels do nothing, so no numbers are looked
at.

HOST_NCCL names the library, which `./dev nccl --source` builds."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worlds import device

LIBRARY = os.environ.get("HOST_NCCL")
SIZE = 2


# --- a rank


def everything(mine: torch.device) -> None:
    rank = dist.get_rank()
    x = torch.ones(1000, device=mine)
    whole = torch.ones(1000 * SIZE, device=mine)
    dist.all_reduce(x)
    works = [dist.all_reduce(x, async_op=True) for _ in range(5)]
    dist.all_gather_into_tensor(whole, x)
    dist.reduce_scatter_tensor(x, whole)
    dist.all_to_all_single(whole, torch.ones_like(whole))
    dist.broadcast(x, 0)
    for work in works:
        work.wait()
    peer = 1 - rank
    ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.ones_like(x), peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for _ in range(3):
        (dist.isend if rank == 0 else dist.irecv)(x, peer).wait()
    torch.accelerator.synchronize()
    assert ctypes.CDLL(LIBRARY).hostNcclLaunches() >= 10


def works(mine: torch.device) -> None:
    everything(mine)
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(10, device=mine), group=group)
    child = dist.split_group(dist.group.WORLD, [[0], [1]])
    dist.all_reduce(torch.ones(10, device=mine), group=child)
    everything(mine)
    dist.destroy_process_group()


def leaves_late(mine: torch.device) -> None:
    everything(mine)
    time.sleep(2 * dist.get_rank())
    dist.destroy_process_group()


def leaves_without(mine: torch.device) -> None:
    everything(mine)


def dies(mine: torch.device) -> None:
    everything(mine)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    until_it_raises(mine, 1000, "rank 1")


def differs(mine: torch.device) -> None:
    everything(mine)
    until_it_raises(mine, 1000 + dist.get_rank(), "")


def goes_on(mine: torch.device) -> None:
    """Two of three ranks, after the third has died."""
    dist.all_reduce(torch.ones(1000, device=mine))
    torch.accelerator.synchronize()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match="rank 2"):
        all_reduces(mine, 1000)
    dist.distributed_c10d.shrink_group([2], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    assert dist.get_world_size() == 2
    everything(mine)
    dist.destroy_process_group()


def all_reduces(mine: torch.device, count: int) -> None:
    began = time.monotonic()
    while time.monotonic() < began + 20:
        dist.all_reduce(torch.ones(count, device=mine))
        time.sleep(0.05)


def until_it_raises(mine: torch.device, count: int, words: str) -> None:
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=words) as caught:
        all_reduces(mine, count)
    print(caught.value)
    dist.destroy_process_group()
    assert time.monotonic() < began + 30


def main() -> None:
    scenario, file = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mine = device.start("standin", "nccl", rank)
    dist.init_process_group(
        "mycoll",
        store=dist.FileStore(file, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
        device_id=mine,
    )
    globals()[scenario](mine)
    print("well", flush=True)


# --- tests


def environment(rank: int, size: int) -> dict[str, str]:
    assert LIBRARY
    compiler = os.environ.get("CXX") or shutil.which("c++") or "c++"

    def of_compiler(name: str) -> str:
        asked = [compiler, f"-print-file-name={name}"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()

    folder = Path(LIBRARY).parent
    preloaded = [of_compiler("libasan.so"), of_compiler("libstdc++.so.6")]
    preloaded += [f"{device.standins()}/libmycoll_standin_cuda.so", f"{folder}/libnvidia-ml.so.1"]
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",
        "MYCOLL_CUDA": "nccl",
        "MYCOLL_NCCL_LIBRARY": LIBRARY,
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_BUFFSIZE": "65536",
        "NCCL_MAX_NCHANNELS": "2",
        "NCCL_CUMEM_HOST_ENABLE": "0",
        "NCCL_RAS_ENABLE": "0",
        "NCCL_TOPO_FILE": f"{folder}/topology.xml",
    }


@pytest.mark.skipif(not LIBRARY, reason="HOST_NCCL is not set; `./dev nccl --source` builds it")
@pytest.mark.parametrize("blocking", ["1", "0"])
@pytest.mark.parametrize("scenario", [works, leaves_late, leaves_without, dies, differs, goes_on])
def test_host_nccl(scenario, blocking: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    if missing := device.missing("standin", "nccl"):
        pytest.skip(missing)
    size = 3 if scenario is goes_on else SIZE
    dead = {dies: 1, goes_on: 2}.get(scenario)
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, scenario.__name__, tmp_path / "store"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment(rank, size), "NCCL_COMM_BLOCKING": blocking},
        )
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, process in enumerate(ranks):
        if rank == dead:
            assert process.returncode == -signal.SIGKILL, said[rank]
            continue
        assert process.returncode == 0, said[rank]
        assert "well" in said[rank], said[rank]
        assert "AddressSanitizer" not in said[rank], said[rank]


if __name__ == "__main__":
    main()
