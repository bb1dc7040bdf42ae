"""`mycoll explain`, and the families that errors name in their last line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mycoll import __main__ as command_line
from mycoll import explain
from worlds.worker import Ctx

ROOT = Path(__file__).resolve().parent.parent


def test_families_of_the_code_exist() -> None:
    source = (ROOT / "csrc/backend/errors.cpp").read_text()
    named = re.findall(r'(?:return|kStarting\[\] =) "([a-z-]+)";', source)
    assert len(named) >= 7
    assert set(named) <= set(explain.sections())


def test_it_prints_one_part_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["explain", "different-collectives"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("### Different collectives\n")
    assert "**Cause.**" in shown and "**What to do.**" in shown and shown.count("#") == 5
    assert command_line.main(["explain", "starting"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("## Starting\n") and "### Ranks did not arrive" in shown
    assert "## Connections" not in shown


def test_it_lists_the_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["the-ranks-do-different-things", "  different-collectives"]


def test_an_unknown_family(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["explain", "diferent-collectives"])
    assert "did you mean different-collectives?" in " ".join(capsys.readouterr().err.split())


def fails(ctx: Ctx) -> tuple[str, str]:
    """The text that a call raises, and that of its future."""
    ctx.init()
    work = dist.all_reduce(torch.ones(3 + ctx.rank), async_op=True)
    with pytest.raises(dist.DistBackendError) as future:
        work.get_future().wait()
    with pytest.raises(dist.DistBackendError) as call:
        dist.all_reduce(torch.ones(3))
    return str(call.value), str(future.value)


def test_errors_name_their_family_once(reused, mycoll_only) -> None:
    for texts in reused(2, "shm").run(fails):
        for text in texts:
            assert text.count("Help: mycoll explain different-collectives") == 1, text
