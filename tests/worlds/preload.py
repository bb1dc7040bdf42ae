"""What ranks find imported already, as the server that they are forked from has it. Of torch that
is what takes a second or more to import and what many jobs need: the first step of any optimizer
imports torch._dynamo. The garbage collector leaves all of it alone: it would look at each object,
and so copy its page, in each rank."""

import gc

gc.disable()  # until all is imported: it finds nothing

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
gc.set_threshold(20_000, 20, 20)  # what ranks make on top of it is little
