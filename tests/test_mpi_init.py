"""init_method="mpi://": the variables of launchers, and a real mpirun if it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mycoll.rendezvous import FIRST_PORT, PORTS, find_place, first_host
from worlds import warm

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prte-1234@1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "99",
    "SLURM_STEP_ID": "0",
    "SLURM_NODELIST": "gpu[07-08]",
}
PMI2 = {"PMI_RANK": "5", "PMI_SIZE": "8"}  # set by `srun --mpi=pmi2`, with hydra's names
PALS = {
    "PALS_RANKID": "2",
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
    "PALS_LOCAL_RANKID": "2",
    "PMI_LOCAL_SIZE": "4",
    "PALS_APID": "7d2c",
}


@pytest.mark.parametrize(
    "environment, launcher, numbers, host",
    [
        (OPEN_MPI | {"MASTER_ADDR": "n1"}, "Open MPI", (3, 4, 1, 2), "n1"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "Open MPI", (3, 4, 1, 4), "127.0.0.1"),
        (OPEN_MPI | SLURM, "Open MPI", (3, 4, 1, 2), "gpu07"),
        (HYDRA, "MPICH (hydra)", (1, 2, 1, 2), "127.0.0.1"),
        (SLURM, "Slurm", (5, 8, 1, None), "gpu07"),
        (SLURM | {"SLURM_NNODES": "1"}, "Slurm", (5, 8, 1, 8), "127.0.0.1"),
        (SLURM | {"PMI_RANK": "", "SLURM_STEP_NUM_TASKS": "6"}, "Slurm", (5, 6, 1, None), "gpu07"),
        (SLURM | PMI2, "Slurm", (5, 8, 1, None), "gpu07"),
        (SLURM | HYDRA, "MPICH (hydra)", (1, 2, 1, 2), "127.0.0.1"),
        (PALS, "PALS", (2, 4, 2, 4), "127.0.0.1"),
    ],
)
def test_places(environment, launcher, numbers, host):
    place = find_place(environment)
    assert place.launcher == launcher
    assert (place.rank, place.size, place.local_rank, place.local_size) == numbers
    assert place.host == host


def test_ports():
    assert find_place(HYDRA).port == 29500  # hydra sets no job id
    assert find_place(HYDRA | {"MASTER_PORT": "1234"}).port == 1234
    first, same = (find_place(SLURM | {"SLURM_PROCID": rank}).port for rank in "05")
    other = find_place(SLURM | {"SLURM_STEP_ID": "1"}).port
    assert first == same != other
    assert FIRST_PORT <= first < FIRST_PORT + PORTS


@pytest.mark.parametrize(
    "environment, words",
    [
        ({}, "none of the launchers' variables"),
        (OPEN_MPI, "Set MASTER_ADDR"),
        (HYDRA | {"PMI_SIZE": ""}, "not usable"),
        (HYDRA | {"PMI_RANK": "2"}, "not usable"),
        (HYDRA | {"MASTER_PORT": "http"}, "MASTER_PORT=http is no port"),
    ],
)
def test_refusals(environment, words):
    with pytest.raises(RuntimeError, match=words):
        find_place(environment)


@pytest.mark.parametrize(
    "nodes, host",
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("n[003-010,12],m1", "n003"),
        ("r[1-2]c[4,7]", "r1c4"),
        ("r[1,3]-ib", "r1-ib"),
    ],
)
def test_first_host(nodes, host):
    assert first_host(nodes) == host


PROGRAM = """
import os, torch, torch.distributed as dist
dist.init_process_group({backend!r}, init_method="mpi://")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print("sum", total.item(), "of", dist.get_world_size(), "local", os.environ["LOCAL_RANK"])
dist.destroy_process_group()
"""


def run(tmp_path: Path, backend: str, command: list[str], **more: str):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(backend=backend))
    if not command:
        program = warm.start(script, environment=dict(os.environ, OMP_NUM_THREADS="1", **more))
        out, error = program.communicate(timeout=120)
        return subprocess.CompletedProcess(script, program.returncode, out, error)
    return subprocess.run(
        [*command, sys.executable, str(script)],
        env=dict(os.environ, OMP_NUM_THREADS="1", **more),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_fake_hydra(tmp_path, backend):
    """One rank with hydra's variables, without hydra."""
    fake = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MASTER_PORT": "29731"}
    done = run(tmp_path, backend, [], **fake)
    assert done.stdout.strip() == "sum 1 of 1 local 0", done.stderr


def test_without_a_launcher(tmp_path, backend):
    done = run(tmp_path, backend, [])
    assert done.returncode == 1
    assert "mpirun -n 2" in done.stderr


@pytest.mark.tools
def test_mpirun(tmp_path, backend):
    mpirun = shutil.which("mpirun")
    if not mpirun:
        pytest.skip("mpirun is not installed")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    command = [mpirun, "-n", "2"]
    if "Open MPI" in version or "open-mpi" in version:
        command += ["--oversubscribe"] + ["--allow-run-as-root"] * (os.geteuid() == 0)
    done = run(tmp_path, backend, command)
    assert done.returncode == 0, done.stderr
    # mpirun may interleave the ranks' output anywhere, so compare the characters.
    expected = "".join(f"sum 3 of 2 local {rank}\n" for rank in (0, 1))
    assert sorted(done.stdout) == sorted(expected), done.stdout
