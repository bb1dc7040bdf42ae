"""torch.distributed.pipelining: every schedule, compared with the model in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules, stage
from worlds import arith
from worlds.training import close
from worlds.worker import Ctx

WIDTH, MICROBATCHES = 16, 4
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
# Two stages per rank, back and forth: rank 0 has the first and the last.
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
# torch 2.11 first sends messages between the neighbours of each stage, also if a rank is its own
# neighbour, as in a V. gloo refuses these. Later versions do this differently, or not at all.
SENDS_TO_ITSELF = hasattr(stage._PipelineStageBase, "_get_init_p2p_neighbors_ops") and not hasattr(
    schedules._PipelineSchedule, "_warmup_p2p"
)


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(4)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = arith.values(torch.float32, (4 * MICROBATCHES, WIDTH), 1).clamp(-3, 3)
    return x, x.roll(1, 0).tanh()


def scheduled(ctx: Ctx, name: str) -> None:
    n = ctx.size
    count = n if name in SINGLE else 2 * n
    if name in SINGLE:
        mine = [ctx.rank]
    elif name in LOOPED:
        mine = [ctx.rank, ctx.rank + n]
    else:
        mine = [ctx.rank, count - 1 - ctx.rank]
    x, y = data()
    wanted = layers(count)
    want = nn.Sequential(*wanted)(x)
    # The losses of the microbatches are added up, and the schedule divides the gradients.
    loss = nn.functional.mse_loss(want, y)
    loss.backward()

    parts = layers(count)
    stages = [pipelining.PipelineStage(parts[i], i, count, torch.device("cpu")) for i in mine]
    schedule = getattr(pipelining, name)(
        stages[0] if name in SINGLE else stages, MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    losses: list[torch.Tensor] = []
    is_last = count - 1 in mine
    out = schedule.step(
        *([x] if 0 in mine else []),
        **({"target": y, "losses": losses} if is_last else {}),
    )
    if is_last:
        close(ctx, out, want, "output")
        close(ctx, torch.stack(losses).mean(), loss, "loss")
    for i in mine:
        for got, p in zip(parts[i].parameters(), wanted[i].parameters(), strict=True):
            close(ctx, got.grad, p.grad, f"gradient of stage {i}")


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("name", [*SINGLE, *LOOPED, *V_SHAPED])
def test_schedule(world, backend, name):
    if backend != "mycoll" and name in V_SHAPED and SENDS_TO_ITSELF:
        pytest.skip("this torch sends messages from a rank to itself, which gloo refuses")
    if name == "ScheduleDualPipeV" and 2 * world.size > MICROBATCHES:
        pytest.skip("needs two microbatches for each rank")
    world.run(scheduled, name)


def test_all_schedules_are_tested():
    public = {name for name in pipelining.__all__ if name.startswith("Schedule")}
    assert public == {*SINGLE, *LOOPED, *V_SHAPED}


def traced(ctx: Ctx) -> None:
    """A model that torch divides into stages itself."""
    torch.manual_seed(4)
    whole = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2 * ctx.size)))
    x, y = data()
    want = whole(x)
    pipe = pipelining.pipeline(
        whole,
        mb_args=(x[: len(x) // MICROBATCHES],),
        split_spec={str(2 * r): pipelining.SplitPoint.BEGINNING for r in range(1, ctx.size)},
    )
    ctx.equal(pipe.num_stages, ctx.size)
    stage = pipe.build_stage(ctx.rank, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    is_last = ctx.rank == ctx.size - 1
    out = schedule.step(*([x] if ctx.rank == 0 else []), **({"target": y} if is_last else {}))
    if is_last:
        close(ctx, out, want, "output")


@pytest.mark.worlds(2)
def test_traced_pipeline(world):
    world.run(traced)
