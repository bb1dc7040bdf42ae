"""Lightning's Trainer accepts any name of a backend, and reduces metrics by ReduceOp.AVG."""

import tempfile

import lightning
import torch
from common import RATE, STEPS, check, data, model, passed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Batches(Dataset):
    """Item 2 * step + rank is the batch of a rank."""

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, i: int) -> tuple:
        return data(i % 2, i // 2)


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def training_step(self, batch, _):
        x, y = (each[0] for each in batch)
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        self.log("count", torch.tensor(1 + self.global_rank), sync_dist=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch, _):
        x, y = (each[0] for each in batch)
        self.log("val", torch.nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)


class InOrder(Regression):
    def train_dataloader(self):
        # Lightning's own sampler would shuffle.
        return DataLoader(Batches(), sampler=DistributedSampler(Batches(), shuffle=False))

    def val_dataloader(self):
        return DataLoader(Batches(), shuffle=False)


module = InOrder()
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="mycoll"),
        max_epochs=1,
        use_distributed_sampler=False,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    check(module.net)
    assert trainer.callback_metrics["count"].item() == 3, trainer.callback_metrics
passed("lightning (Trainer)", lightning.__version__)
