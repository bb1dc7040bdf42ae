"""transformers' Trainer uses accelerate, and thus an existing group."""

import tempfile

import torch
import torch.distributed as dist
import transformers
from common import BATCH, RATE, STEPS, check, data, model, passed
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

dist.init_process_group("mycoll")


class Rows(Dataset):
    """In the order in which the Trainer distributes batches to the ranks."""

    def __init__(self) -> None:
        parts = [data(r, step) for step in range(STEPS) for r in range(2)]
        self.x, self.y = (torch.cat(each) for each in zip(*parts))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict:
        return {"x": self.x[i], "labels": self.y[i]}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, x, labels=None):
        out = self.net(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


regression = Regression()
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    assert arguments.world_size == 2
    trainer = InOrder(
        model=regression,
        args=arguments,
        train_dataset=Rows(),
        eval_dataset=Rows(),
        optimizers=(torch.optim.SGD(regression.parameters(), lr=RATE), None),
    )
    trainer.train()
    assert trainer.state.global_step == STEPS
    check(regression.net)
    assert trainer.evaluate()["eval_loss"] > 0
passed("transformers", transformers.__version__)
