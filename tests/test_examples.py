"""Runs the programs of examples/ as their first lines describe, but without torchrun and on
processes that have already imported torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from worlds import warm

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
DEADLINE = 120


@pytest.fixture(autouse=True)
def only_mycoll(request, backend):
    if backend != "mycoll":
        pytest.skip("the examples name mycoll")


def two_ranks(program: Path, codes: tuple[int, int] = (0, 0)) -> str:
    return run_ranks(program, codes=codes)


def run_ranks(program: Path, *arguments: str, codes: tuple[int, ...] = (0, 0)) -> str:
    """Runs one rank for each of the expected exit codes."""
    folder = program.parent if program.parent != EXAMPLES else None
    ended = warm.ranks(
        program,
        len(codes),
        *arguments,
        folder=folder,
        preload=warm.OPTIMIZERS,
        timeout=DEADLINE,
    )
    outputs = [out + error for _, out, error in ended]
    assert tuple(code for code, *_ in ended) == codes, "\n".join(outputs)
    return "".join(outputs)


@pytest.mark.parametrize(
    "name, words",
    [
        ("point_to_point.py", "neighbours: rank 1 received from 0"),
        ("collectives.py", "objects: [{'rank': 0, 'lr': 0.1}, {'rank': 1, 'lr': 0.1}]"),
        ("sgd_by_hand.py", "loss after training: {'ring': "),
        ("ddp.py", "epoch 4: loss 0.0"),
        ("model_parallel.py", "equal on all ranks"),
        ("pipeline.py", "one process"),
        ("sharded.py", "tensor parallel"),
    ],
)
def test_example(name, words):
    assert words in two_ranks(EXAMPLES / name)


def test_elastic(tmp_path: Path):
    """The processes are forked from one that has imported torch."""
    text = (EXAMPLES / "elastic.py").read_text()
    spawn = 'context = mp.get_context("spawn")'
    forked = "from worlds import servers; context = servers.context()"
    assert text.count(spawn) == 1
    text = text.replace(spawn, forked)
    program = tmp_path / "elastic.py"
    program.write_text(text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = warm.start(program, environment=environment)
    try:
        out, errors = done.communicate(DEADLINE)
    finally:
        done.kill()
    assert done.returncode == 0, out + errors
    lines = [line for line in out.splitlines() if not line.startswith("[mycoll")]
    steps = [re.fullmatch(r"step (\d+): (\d) ranks", line) for line in lines]
    assert [found[2] for found in steps if found] == ["4", "2", "3", "3"], out
    assert lines[-1].startswith("done: all ranks have the same parameters")


def program_of_readme() -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert len(blocks) == 1
    return blocks[0]


def test_first_run_of_readme(tmp_path: Path):
    (tmp_path / "train.py").write_text(program_of_readme())
    assert re.search(r"step 100: loss 0\.0", two_ranks(tmp_path / "train.py"))
    assert (tmp_path / "model.pt").exists()


def test_mistake_of_readme(tmp_path: Path):
    """The error in the README is the one that its mistake raises."""
    call = "        dist.all_reduce(mean, dist.ReduceOp.AVG)\n"
    test = "        if rank == 0:\n"
    right = program_of_readme()
    assert call + test in right
    (tmp_path / "train.py").write_text(right.replace(call + test, test + "    " + call))
    output = two_ranks(tmp_path / "train.py", (1, 1))
    shown = re.search(r"^```\n(mycoll group.*?)```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert shown
    lines = shown[1].splitlines()
    assert len(lines) == 7
    assert lines.pop(5).startswith("  Trace: mycoll trace /tmp/mycoll-")  # no traces in the tests

    def words(text: str) -> str:
        """The text without the parts that differ between runs: host, process and group name."""
        return re.sub(r"group '[^']*'", "group", re.sub(r"\(\S+:\d+\)", "", text))

    for line in lines:
        assert words(line) in words(output), (line, output)


def programs_of_tutorial(folder: Path) -> dict[str, Path]:
    """Writes the programs into the folder; returns their paths by name."""
    text = (ROOT / "docs/tutorial.md").read_text()
    found = re.findall(r"`(\w+\.py)`[^`]*\n\n```python\n(.*?)^```", text, re.M | re.S)
    assert [name for name, _ in found] == ["hello.py", "wrong.py", "stuck.py"]
    for name, program in found:
        (folder / name).write_text(program)
    return {name: folder / name for name, _ in found}


def test_programs_of_tutorial(tmp_path: Path):
    programs = programs_of_tutorial(tmp_path)
    shown = (ROOT / "docs/tutorial.md").read_text()
    output = two_ranks(programs["hello.py"])
    for rank in range(2):
        line = f"rank {rank} of 2: [3.0, 3.0, 3.0, 3.0]"
        assert line in output and line in shown
    output = two_ranks(programs["wrong.py"], (1, 1))
    for words in ("MISMATCH at collective #0", "all_reduce SUM float32 numel=5 (call #0)"):
        assert words in output
    assert "MISMATCH at collective #0" in shown
    # Rank 1 sleeps for a second instead of an hour, and then kills itself.
    text = programs["stuck.py"].read_text()
    assert text.count("time.sleep(3600)") == 1
    ends = "(time.sleep(1), os.kill(os.getpid(), 9))"
    programs["stuck.py"].write_text("import os\n" + text.replace("time.sleep(3600)", ends))
    output = two_ranks(programs["stuck.py"], (1, -9))
    for words in ("has ended (killed, crashed or left", "The group is dead; see that rank's log."):
        assert words in output and words in shown


@pytest.mark.tools
def test_notebook():
    command = [sys.executable, str(EXAMPLES / "notebook.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert re.fullmatch(r"\[(3\.14\d*), \1\]", done.stdout.strip()), done.stdout + done.stderr


def test_ddp_restart(tmp_path: Path):
    """Run by torchrun's agent, a job that crashes has the same result as one that does not."""
    (tmp_path / "crash").mkdir()
    program = [str(EXAMPLES / "ddp_restart.py"), "--folder", str(tmp_path / "crash")]
    done = warm.run_module(
        "worlds.agent",
        *("1", *program, "--crash-at", "25"),
        environment={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attempt 1 starts at step 20" in done.stdout, done.stdout
    (tmp_path / "calm").mkdir()
    calm = run_ranks(EXAMPLES / "ddp_restart.py", "--folder", str(tmp_path / "calm"))
    outcomes = [re.search(r"done: .*", each) for each in (done.stdout, calm)]
    assert outcomes[0] and outcomes[1] and outcomes[0][0] == outcomes[1][0]


def test_checkpoint(tmp_path: Path):
    """Four steps on two ranks and then four on one have the result of eight steps on one."""

    def run(ranks: int, folder: str, steps: int) -> str:
        words = ("--folder", str(tmp_path / folder), "--steps", str(steps))
        return run_ranks(EXAMPLES / "checkpoint.py", *words, codes=(0,) * ranks)

    run(2, "parts", 4)
    continued = run(1, "parts", 8)
    assert "1 ranks start at step 4" in continued
    whole = run(1, "whole", 8)
    sums = [float(re.search(r"sum of weights (\S+)", out)[1]) for out in (continued, whole)]
    assert abs(sums[0] - sums[1]) < 1e-3, sums


def test_all_are_listed():
    page = (EXAMPLES / "README.md").read_text()
    assert set(re.findall(r"^\| `(\w+\.py)`", page, re.MULTILINE)) == {
        path.name for path in EXAMPLES.glob("*.py")
    }
