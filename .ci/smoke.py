"""Whether mycoll works where it was installed: two ranks, without torchrun. The argument is a path
for their store."""

import os
import re
import subprocess
import sys
from pathlib import Path

RANKS = 2


def rank(number: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "mycoll", store=dist.FileStore(store, RANKS), rank=number, world_size=RANKS
    )
    for count in (4, 1 << 20):
        tensor = torch.arange(count, dtype=torch.float32) * (number + 1)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert torch.equal(tensor, torch.arange(count, dtype=torch.float32) * 3)
    names: list[object] = [None] * RANKS
    dist.all_gather_object(names, f"rank {number}")
    assert names == ["rank 0", "rank 1"]
    try:
        dist.all_reduce(torch.ones(3 + number))
        raise AssertionError("sizes that differ were not refused")
    except dist.DistBackendError:  # thrown in mycoll, translated in torch
        pass
    dist.destroy_process_group()

    minor = ".".join(torch.__version__.split(".")[:2])
    maps = Path("/proc/self/maps").read_text()
    assert set(re.findall(r"/(torch[0-9.]+)/_C\.", maps)) == {f"torch{minor}"}, maps
    if number == 0:
        import mycoll

        python = ".".join(map(str, sys.version_info[:2]))
        print(f"mycoll {mycoll.__version__} works with torch {torch.__version__}, Python {python}")


if len(sys.argv) == 3:
    rank(int(sys.argv[2]), sys.argv[1])
else:
    Path(sys.argv[1]).unlink(missing_ok=True)
    command = [sys.executable, __file__, sys.argv[1]]
    environment = {**os.environ, "MYCOLL_LOG": "off"}  # it would tell of the mismatch, too
    processes = [
        subprocess.Popen([*command, str(number)], env=environment) for number in range(RANKS)
    ]
    codes = [process.wait(120) for process in processes]
    sys.exit(any(codes))
