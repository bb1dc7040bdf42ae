"""libmycoll.so and mycoll._C share the variables that a header of csrc/ defines."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest


def variables(library: Path, kinds: str) -> set[str]:
    """The variables of mycoll that a library defines, of these kinds of nm."""
    command = ["nm", "--demangle", "--defined-only", library]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^\w+ (\w) (.*)$", output, re.MULTILINE)
    return {name for kind, name in lines if kind in kinds and "mycoll::" in name}


@pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm")
def test_state_exists_once() -> None:
    module = pytest.importorskip("mycoll._C", reason="mycoll is not built", exc_type=ImportError)
    path = Path(module.__file__)
    shared = path.parent.parent / "libmycoll.so"
    everywhere = variables(shared, "BDVu")
    assert any("logLevel" in name for name in everywhere & variables(path, "BDVu"))
    # Lower case: local to this library, so that the other one has its own.
    alone = variables(path, "bd") & (everywhere | variables(shared, "bd"))
    assert not {name for name in alone if "(anonymous namespace)" not in name}
