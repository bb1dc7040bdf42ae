"""Small programs that use libraries on top of torch.distributed: `./dev test --clients`.

That installs the libraries (requirements-clients.txt) into a separate environment. Otherwise, tests
of missing libraries are skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
EXAMPLES = FOLDER.parents[1] / "examples"
DEADLINE = 240

CLIENTS = [
    ("accelerate", "with_accelerate.py", ()),
    ("transformers", "with_transformers.py", ()),
    ("transformers", "with_tensor_parallel.py", ()),
    ("lightning", "with_fabric.py", ()),
    ("lightning", "with_lightning.py", ()),
    ("torchmetrics", "with_torchmetrics.py", ()),
    ("pytorch-ignite", "with_ignite.py", ()),
    ("torchft", "with_torchft.py", ()),
    ("torchft-nightly", "with_torchft_nightly.py", ()),
    ("ray", "with_ray.py", ()),
    *(("deepspeed", "with_deepspeed.py", (str(stage), "mycoll")) for stage in range(4)),
]


@pytest.mark.parametrize(
    "library, program, arguments",
    CLIENTS,
    ids=["-".join((Path(program).stem, *more)) for _, program, more in CLIENTS],
)
def test_client(backend, tmp_path: Path, library: str, program: str, arguments: tuple[str, ...]):
    if backend != "mycoll":
        pytest.skip("the programs name mycoll")
    if not any(metadata.distributions(name=library)):
        pytest.skip(f"{library} is not installed: ./dev test --clients")
    output = output_of(tmp_path, program, *arguments)
    found = re.search(r"client: (.*)", output)
    assert found, output[-6000:]
    print(found[1])
    if library == "deepspeed":  # compared with gloo
        # Over gloo it sometimes aborts at its end, also without mycoll.
        beside = output_of(tmp_path, program, arguments[0], "gloo", may_abort=True)
        outcomes = [re.findall(r"weights: (.*)", each) for each in (output, beside)]
        assert outcomes[0] == outcomes[1] != []


def output_of(folder: Path, program: str, *arguments: str, may_abort: bool = False) -> str:
    paths = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launch, "--nproc-per-node", "2", str(FOLDER / program), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    aborted = may_abort and "client: " in done.stdout and "exitcode: -6" in done.stdout
    assert done.returncode == 0 or aborted, done.stdout[-6000:]
    return done.stdout


def test_all_programs_are_run():
    programs = {program for _, program, _ in CLIENTS}
    assert {path.name for path in FOLDER.glob("with_*.py")} == programs
