"""Imports of the server that ranks are forked from: the parts of torch that take a second or more
and that many jobs need (the first step of any optimizer imports torch._dynamo). These objects are
frozen, because the garbage collector would visit each of them, and so copy its page, in each
rank."""

import gc

gc.disable()  # until everything is imported

import pytest  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed.checkpoint  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.tensor  # noqa: E402
import torch.testing  # noqa: E402

from worlds import arith, device, worker  # noqa: E402

__all__ = ["arith", "device", "pytest", "torch", "worker"]

gc.collect()
gc.freeze()
gc.enable()
gc.set_threshold(20_000, 20, 20)  # ranks make few further objects
