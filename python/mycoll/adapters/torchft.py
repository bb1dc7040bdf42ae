"""torchft's process group, over mycoll.

    from mycoll.adapters.torchft import ProcessGroupMycoll

    manager = Manager(pg=ProcessGroupMycoll(timeout=timedelta(seconds=30)), ...)

In the place of torchft's ProcessGroupGloo. Beside what that does, it has reduce_scatter, and CUDA
tensors travel as in any mycoll group. With each quorum the old group is aborted, which ends what is
under way, and a new one is made.

If a replica is lost, the `wait()` of an all_reduce returns on the other replicas, and `errored()`
has the error: the Manager asks for it, and discards the step. Otherwise the
DistributedDataParallel of torchft 0.2 would raise an AssertionError in backward(), which ends the
other replicas, too. All other operations raise their errors.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import DistError, ProcessGroup, Store
from torch.futures import Future
from torchft.process_group import ProcessGroupWrapper

from mycoll import groups


class ProcessGroupMycoll(ProcessGroupWrapper):  # type: ignore[misc]
    """Reconfigurable: torchft hands it a new store, rank and size with each quorum."""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        self._errors: list[Exception] = []  # of this quorum; its all_reduces share the list

    def _create_pg(self, store: Store, rank: int, world_size: int) -> ProcessGroup:
        self._errors = []
        # The store is that of this quorum alone.
        return groups.process_group(
            store, rank, world_size, timeout=self._timeout, name=self.getBackendName()
        )

    def getBackendName(self) -> str:
        """The name of the groups, for torchft."""
        return "torchft-mycoll"

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """Starts an all_reduce. Its failure is not raised: see errored()."""
        try:
            work = super().allreduce(tensors, opts)
        except DistError as error:
            self._errors.append(error)
            work = None
        return _AllReduce(work, tensors, self._errors)

    def errored(self) -> Exception | None:
        """Returns the first failure of an all_reduce of this quorum, or None."""
        return self._errors[0] if self._errors else None


class _AllReduce(Work):
    """Ends without an error; the list has it."""

    def __init__(self, work: Work | None, tensors: list[Tensor], errors: list[Exception]) -> None:
        super().__init__()
        self._work = work  # None: it could not be started
        self._tensors = tensors
        self._errors = errors

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._work is not None:
            try:
                self._work.wait(*([] if timeout is None else [timeout]))
            except DistError as error:
                self._errors.append(error)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        if self._work is not None:
            self._work.block_current_stream()

    def get_future(self) -> Future[Any]:
        if self._work is not None:
            return self._work.get_future().then(self._result)
        future: Future[Any] = Future()
        future.set_result(self._tensors)
        return future

    def _result(self, future: Future[Any]) -> Any:
        try:
            return future.value()
        except RuntimeError as error:  # a DistError, or what a future makes of an error
            self._errors.append(error)
            return self._tensors
