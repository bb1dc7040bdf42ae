"""What ranks find imported already, as the server that they are forked from has it. Of torch that
is what takes a second or more to import and what many jobs need: the first step of any optimizer
imports torch._dynamo. The garbage collector leaves all of it alone: it would look at each object,
and so copy its page, in each rank."""

import gc

import pytest
import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.testing

from worlds import arith, device, worker

__all__ = ["arith", "device", "pytest", "torch", "worker"]

gc.collect()
gc.freeze()
gc.set_threshold(20_000, 20, 20)  # what ranks make on top of it is little
