"""torchmetrics gathers its states over the default group."""

import torch
import torch.distributed as dist
import torchmetrics
from common import passed
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.regression import MeanSquaredError

dist.init_process_group("mycoll")
rank = dist.get_rank()
scores = torch.randn(2, 50, 4, generator=torch.Generator().manual_seed(0))
labels = torch.randint(0, 4, (2, 50), generator=torch.Generator().manual_seed(1))


def make() -> MetricCollection:
    return MetricCollection([MulticlassAccuracy(num_classes=4)])


mine, whole = make(), make()
mine.update(scores[rank], labels[rank])
# The expected result, computed by each rank alone.
for metric in whole.values():
    metric.sync_on_compute = False
whole.update(scores.flatten(0, 1), labels.flatten())
assert torch.equal(mine.compute()["MulticlassAccuracy"], whole.compute()["MulticlassAccuracy"])
mean = MeanMetric()
mean.update(torch.arange(3 + rank, dtype=torch.float32))
torch.testing.assert_close(mean.compute(), torch.tensor(9 / 7))
error = MeanSquaredError()
error.update(torch.full((4,), float(rank)), torch.zeros(4))
assert error.compute().item() == 0.5
listed = CatMetric()  # unequal lengths: padded by torchmetrics
listed.update(torch.full((1 + 2 * rank,), float(rank)))
assert sorted(listed.compute().tolist()) == [0.0, 1.0, 1.0, 1.0]
assert dist.get_backend() == "mycoll"
passed("torchmetrics", torchmetrics.__version__)
