"""The stand-in accelerator: it is asynchronous, and it detects mistakes.

Its C functions are tested in tests/cpp/standin_device_test.cpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable

import pytest
import torch
from standins import accelerator
from worlds.pool import WorldFailure
from worlds.worker import Ctx

if accelerator.folder() is None:
    pytest.skip("the stand-ins are not built; ./dev builds them", allow_module_level=True)

POISON = torch.frombuffer(bytearray([0xDB] * 4), dtype=torch.float32)[0].item()


@pytest.fixture
def alone(pool):
    return pool.get(pool.spec(1, init=False))


def full(value: float, numel: int = 100) -> torch.Tensor:
    return torch.full((numel,), value, device="standin")


def asynchrony(ctx: Ctx) -> None:
    device = accelerator.load()
    x = full(1.0)
    device.current_stream().synchronize()
    other = torch.Stream(device="standin")
    with device.held():
        x.fill_(2.0)
        y = x + 1
        with device.stream(other):
            ctx.same(x, torch.full((100,), 1.0), "without a wait, the old value:")
            ctx.same(y, torch.full((100,), POISON), "without a wait, poison:")
        ctx.equal(device.current_stream().query(), False, "query() of a held stream")
        other.wait_stream(device.current_stream())
    with device.stream(other):
        ctx.same(x, torch.full((100,), 2.0), "after a wait:")
        ctx.same(y, torch.full((100,), 3.0), "after a wait:")


def events(ctx: Ctx) -> None:
    device = accelerator.load()
    start, end = (torch.Event("standin", enable_timing=True) for _ in range(2))
    with device.held():
        start.record()
        ctx.equal(start.query(), False, "before it passed")
    device.sleep(30_000)
    end.record()
    end.synchronize()
    ctx.equal((start.query(), end.query()), (True, True))
    ctx.equal(start.elapsed_time(end) >= 30, True, "30 ms at least")
    ctx.equal(device.priority(torch.Stream(device="standin", priority=-1)), -1, "priority")
    with ctx.raises((RuntimeError, ValueError), "timing"):
        plain = torch.Event("standin")
        plain.record()
        plain.elapsed_time(plain)


def copies(ctx: Ctx) -> None:
    device = accelerator.load()
    x = full(1.0)
    pinned = torch.full((100,), 5.0).pin_memory()
    ctx.equal(pinned.is_pinned(), True)
    with device.held():
        x.copy_(pinned, non_blocking=True)
        pinned.fill_(6.0)  # too early, as on a real device
    ctx.same(x, torch.full((100,), 6.0), "pinned memory is read later:")
    back = torch.empty(100, pin_memory=True)
    with device.held():
        back.copy_(x, non_blocking=True)
        ctx.equal(back[0].item(), torch.tensor(POISON).item(), "has not arrived yet")
    device.synchronize()
    ctx.same(back, torch.full((100,), 6.0), "arrived:")
    strided = torch.zeros(10, 10, device="standin")[:, ::2]
    strided.copy_(torch.arange(50.0).reshape(10, 5))
    ctx.same(strided, torch.arange(50.0).reshape(10, 5))
    ctx.same(full(1.0).to("standin:2"), torch.ones(100), "between devices:")


def streams_of_threads_and_devices(ctx: Ctx) -> None:
    device = accelerator.load()
    side = torch.Stream(device="standin:1")
    with device.device(1), device.stream(side):
        ctx.equal(device.current_device(), 1)
        ctx.equal(device.current_stream(1) == side, True, "the current stream")
        ctx.equal(torch.empty(1, device="standin").device.index, 1)
    ctx.equal(device.current_device(), 0)
    ctx.equal(device.current_stream(1) == side, False, "the stream that was current before")
    ctx.equal(torch.accelerator.current_accelerator().type, "standin")


def training(ctx: Ctx) -> None:
    """Enough of torch works for training."""
    accelerator.load()
    torch.manual_seed(1)
    model, reference = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    reference.load_state_dict(model.state_dict())
    model.to("standin")
    x = torch.randn(3, 4)
    for each, data in ((model, x.to("standin")), (reference, x)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(data).square().sum().backward()
        optimizer.step()
    ctx.same(model.weight.detach(), reference.weight.detach())
    buffer = torch.ones(8, device="standin")
    buffer.untyped_storage().resize_(0)
    buffer.untyped_storage().resize_(32)
    ctx.same(buffer, torch.full((8,), POISON), "FSDP's way of freeing: gone")
    ctx.equal(torch.Generator("standin").device.type, "standin")


def capture(ctx: Ctx) -> None:
    device = accelerator.load()
    x, side = full(0.0), torch.Stream(device="standin")
    graph = device.Graph()
    with graph.capture():
        x.add_(1)
        side.wait_stream(device.current_stream())
        with device.stream(side):
            ctx.equal(device.is_capturing(), True, "a stream that joined")
            x.mul_(2)
        device.current_stream().wait_stream(side)
    ctx.same(x, torch.zeros(100), "recorded, not run:")
    graph.replay()
    graph.replay()
    ctx.same(x, torch.full((100,), 6.0), "replayed twice:")
    with ctx.raises(RuntimeError, "not joined back"), device.Graph().capture():
        side.wait_stream(device.current_stream())
        with device.stream(side):
            x.add_(1)
    ctx.equal(device.is_capturing(side), False)
    # Waiting is refused; the stand-in for the CUDA runtime also invalidates the capture.
    with (
        contextlib.suppress(RuntimeError),
        device.Graph().capture(),
        ctx.raises(RuntimeError, "captur"),
    ):
        device.current_stream().synchronize()


def recorded_streams(ctx: Ctx) -> None:
    device = accelerator.load()
    side = torch.Stream(device="standin")
    before = device.counts()
    x = full(4.0)
    side.wait_stream(device.current_stream())
    with device.held(side):
        with device.stream(side):
            y = x + 1
        x.record_stream(side)
        del x  # freed only when the side stream has run this work
    ctx.equal(device.counts()["recorded_uses"] - before["recorded_uses"], 1)
    with device.stream(side):
        ctx.same(y, torch.full((100,), 5.0))


@pytest.mark.parametrize(
    "job",
    [
        asynchrony,
        events,
        copies,
        streams_of_threads_and_devices,
        training,
        capture,
        recorded_streams,
    ],
    ids=lambda job: job.__name__,
)
def test_standin(alone, job):
    alone.run(job)


# --- mistakes abort the process with a message


def used_after_free(ctx: Ctx) -> None:
    device = accelerator.load()
    side = torch.Stream(device="standin")
    x = full(1.0)
    side.wait_stream(device.current_stream())
    with device.held(side):
        with device.stream(side):
            _ = x + 1  # x is not kept alive for it
        del x
        _ = full(2.0)  # may have the address of x
        device.current_stream().synchronize()
    side.synchronize()


def written_after_free(ctx: Ctx) -> None:
    device = accelerator.load()
    x = torch.zeros(100).pin_memory()
    view = x.numpy()
    address = view.ctypes.data
    del x, view
    ctypes.memset(address, 1, 4)
    device.verify()


def read_by_the_host(ctx: Ctx) -> None:
    accelerator.load()
    x = full(1.0)
    torch.accelerator.synchronize()
    ctypes.string_at(x.data_ptr(), 4)  # the host dereferences a device address


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (used_after_free, "which were freed"),
        (written_after_free, "after they were freed"),
        (read_by_the_host, "SIGSEGV"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, Callable) else "",
)
def test_mistakes_are_detected(fresh, job, message):
    with pytest.raises(WorldFailure, match=message):
        fresh(1, init=False).run(job)


def raced(ctx: Ctx) -> None:
    accelerator.load().race()


@pytest.mark.skipif(os.environ.get("SANITIZER") != "thread", reason="needs ./dev sanitize")
def test_the_thread_sanitizer_finds_a_race(fresh):
    with pytest.raises(WorldFailure, match="data race"):
        fresh(1, init=False).run(raced)


def delayed(ctx: Ctx) -> None:
    device = accelerator.load()
    ctx.equal(os.environ["STANDIN_DELAY_US"], "20000")
    start, end = (torch.Event("standin", enable_timing=True) for _ in range(2))
    x = full(0.0)
    start.record()
    for _ in range(20):
        x.add_(1)
    end.record()
    end.synchronize()
    ctx.equal(start.elapsed_time(end) > 20, True, "20 tasks of 10 ms on average")
    device.set_delay(0)


def test_delays(fresh):
    fresh(1, init=False, env=(("STANDIN_DELAY_US", "20000"),)).run(delayed)
