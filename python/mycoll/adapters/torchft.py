"""torchft's process group, over mycoll.

    from mycoll.adapters.torchft import ProcessGroupMycoll

    manager = Manager(pg=ProcessGroupMycoll(timeout=timedelta(seconds=30)), ...)

In the place of torchft's ProcessGroupGloo. Beside what that does, it has reduce_scatter, and CUDA
tensors travel as in any mycoll group. With each quorum the old group is aborted, which ends what is
under way, and a new one is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchft.process_group import ProcessGroupWrapper

from mycoll import groups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store


class ProcessGroupMycoll(ProcessGroupWrapper):  # type: ignore[misc]
    """Reconfigurable: torchft hands it a new store, rank and size with each quorum."""

    def _create_pg(self, store: Store, rank: int, world_size: int) -> ProcessGroup:
        # The store is that of this quorum alone.
        return groups.process_group(
            store, rank, world_size, timeout=self._timeout, name=self.getBackendName()
        )

    def getBackendName(self) -> str:
        """The name of the groups, for torchft."""
        return "torchft-mycoll"
