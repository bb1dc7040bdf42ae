"""torch's own tests of torch.distributed on the CPU, from its wheel, over gloo. Run by
test_others.py."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from pathlib import Path

FOLDER = Path(tempfile.mkdtemp())
for name in ("barrier", "test_dir", "init_dir"):
    (FOLDER / name).mkdir()
os.environ.update(
    BACKEND="gloo",
    WORLD_SIZE="2",
    TEMP_DIR=str(FOLDER),
    INIT_METHOD=f"file://{FOLDER}/init_dir/shared",
)

from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    DistributedTest,
    TestDistBackend,
)


class TestGloo(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        # Forked ranks need not import torch.
        self._start_processes(multiprocessing.get_context("fork").Process)
