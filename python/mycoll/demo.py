"""`mycoll demo`: data-parallel training on two ranks, then collectives timed beside gloo.

Everything happens on this machine with data that is made up here. Read it as an example, too: only
`init_process_group` knows which backend is used.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mycoll._pipes import is_unread, silence
from mycoll._terminal import Parser, is_terminal
from mycoll.replace import keep_names_honest

KIB, MIB = 1 << 10, 1 << 20
CLASSES = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="mycoll demo", description=__doc__)
    parser.add_argument("--backend", default="mycoll", help="train over another backend")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3000, help="training steps")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each timing")
    options = parser.parse_args(arguments)
    for name in ("ranks", "steps", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    keep_names_honest("mycoll demo")

    # The parent holds the rendezvous store and picks a free port for it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = torch.multiprocessing.spawn(
        run_rank, (store.port, options), nprocs=options.ranks, join=False
    )
    while not ranks.join(timeout=0.2):
        if is_unread():
            for process in ranks.processes:
                process.kill()
            raise BrokenPipeError
    return 0


def run_rank(rank: int, port: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(options.backend, store=store, rank=rank, world_size=options.ranks)
    say(f"Training on {options.ranks} ranks over {options.backend}, torch {torch.__version__}\n")
    model = train(options.steps)
    check_weights(model)
    time_collectives(options.backend, options.rounds)
    dist.destroy_process_group()


# --- the training ---------------------------------------------------------------------------------


def spirals(points: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on three intertwined spiral arms, and the arm of each."""
    random = torch.Generator().manual_seed(seed)
    radius = torch.rand(points, generator=random)
    arm = torch.randint(CLASSES, (points,), generator=random)
    noise = torch.randn(points, generator=random) * 0.15
    angle = 2 * math.pi * (arm / CLASSES + 2 * radius) + noise
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm


def train(steps: int, batch: int = 256) -> nn.Module:
    torch.manual_seed(0)  # DDP would broadcast rank 0's weights anyway
    layers: list[nn.Module] = []
    for inputs, outputs in [(2, 256), (256, 256), (256, 256)]:
        layers += [nn.Linear(inputs, outputs), nn.GELU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(256, CLASSES)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Each rank sees other data; only the gradients that DDP all-reduces make them agree.
    points, arms = spirals(20_000, seed=dist.get_rank() + 1)
    test_points, test_arms = spirals(2_000, seed=1000 + dist.get_rank())

    start = time.perf_counter()
    for step in range(1, steps + 1):
        chosen = torch.randint(len(points), (batch,))
        loss = nn.functional.cross_entropy(model(points[chosen]), arms[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step == steps or step % max(1, steps // 40) == 0:
            with torch.no_grad():
                right = (model.module(test_points).argmax(dim=1) == test_arms).float().mean()
            # Loss and accuracy of all ranks, in one small tensor.
            means = torch.stack([loss.detach(), right])
            dist.all_reduce(means)
            means /= dist.get_world_size()
            bar = "#" * round(24 * step / steps)
            progress(
                f"  [{bar:24}] step {step:5d}  loss {means[0]:.4f}  accuracy {means[1]:6.1%}"
                f"  {step / (time.perf_counter() - start):5.0f} steps/s",
                milestone=step == 1 or step == steps or step % max(1, steps // 10) == 0,
            )
    if on_terminal():
        say("")
    return model


def check_weights(model: nn.Module) -> None:
    """All ranks must hold the same weights, to the last bit."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    if not all(torch.equal(other, mine) for other in everyone):
        raise SystemExit(f"rank {dist.get_rank()}: the ranks' weights differ")
    say(f"\nWeights of all ranks are identical to the bit (sha256 {digest.hexdigest()[:16]}).\n")


# --- the timing -----------------------------------------------------------------------------------


def operations(group: dist.ProcessGroup) -> dict[tuple[str, int], Callable[[], object]]:
    """What is timed, by name and bytes: those of the largest tensor of the operation."""
    world = dist.get_world_size()
    # torch 2.13 gave it a shorter name, and warns about the old one.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    calls: dict[tuple[str, int], Callable[[], object]] = {
        ("barrier", 0): lambda: dist.barrier(group)
    }

    def add(size: int) -> None:
        whole = torch.zeros(size // 4)
        part = torch.zeros(size // 4 // world)
        parts = torch.zeros(part.numel() * world)
        other = torch.zeros_like(parts)
        calls["all_reduce", size] = lambda: dist.all_reduce(whole, group=group)
        calls["broadcast", size] = lambda: dist.broadcast(whole, 0, group=group)
        calls["all_gather", size] = lambda: all_gather(parts, part, group=group)
        calls["all_to_all", size] = lambda: dist.all_to_all_single(parts, other, group=group)

    for size in (4 * KIB, 256 * KIB, 16 * MIB):
        add(size)
    return calls


def time_collectives(backend: str, rounds: int) -> None:
    """Medians over rounds; in each round the backends take turns, so that noise hits both."""
    names = list(dict.fromkeys([backend, "gloo"]))
    candidates = {name: operations(dist.new_group(backend=name)) for name in names}
    say(f"Microseconds a call: median of {rounds} rounds in which the backends take turns.\n")
    header = "".join(f"{name:>12}" for name in names)
    say(f"  {'':12}{'size':>10}{header}" + ("   gloo takes" if len(names) == 2 else ""))
    for name, size in sorted(candidates[backend]):
        samples: dict[str, list[float]] = {each: [] for each in names}
        repeats = 3 if size >= MIB else 50
        for turn in range(rounds + 1):
            for each in names:
                call = candidates[each][name, size]
                dist.barrier()
                start = time.perf_counter()
                for _ in range(repeats):
                    call()
                if turn:  # the first round makes the connections
                    samples[each].append((time.perf_counter() - start) / repeats * 1e6)
        medians = [statistics.median(samples[each]) for each in names]
        numbers = "".join(f"{median:12.1f}" for median in medians)
        ratio = f"{medians[1] / medians[0]:10.1f} x" if len(names) == 2 else ""
        say(f"  {name:12}{readable(size):>10}{numbers}{ratio}")
    say("\n`mycoll bench` measures more, and with more care.")


def readable(size: int) -> str:
    if not size:
        return ""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


# --- the screen: rank 0 only ----------------------------------------------------------------------


def say(text: str, end: str = "\n") -> None:
    if dist.get_rank() != 0:
        return
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        silence()  # main() sees it, too, and ends all ranks


def progress(line: str, milestone: bool) -> None:
    """One line that moves on a terminal; elsewhere, a line for each milestone."""
    if on_terminal():
        say(f"\r{line}", end="")
    elif milestone:
        say(line)


def on_terminal() -> bool:
    return is_terminal(sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
