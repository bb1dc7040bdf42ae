"""init_method="mpi://": reads the rank and the place of rank 0 from the launcher's variables.

Known are Open MPI, PALS (Cray), MPICH and Intel MPI (hydra), and Slurm's srun. No MPI library is
used. Loaded only when a program asks for mpi://.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

if TYPE_CHECKING:
    from torch.distributed import Store

DEFAULT_PORT = 29500  # torch's own
# Below the ports that systems give to outgoing connections, above those of well-known services.
FIRST_PORT, PORTS = 10_240, 22_000


@dataclass(frozen=True)
class Launcher:
    """The variables that a launcher sets: names with a space between, of which the first that is
    set counts."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    nodes: str = ""
    job: str = ""
    # Where Slurm sets the others, too (srun --mpi=pmi2): not these.
    own: str = ""

    def has_started(self, environment: Mapping[str, str]) -> bool:
        """Returns whether this launcher has set the environment."""
        if self.own and environment.get("SLURM_PROCID") and not _value(environment, self.own):
            return False
        return bool(_value(environment, self.rank))


# In this order: mpirun inside a Slurm job sees Slurm's variables, too, and they are not its own.
LAUNCHERS = (
    Launcher(
        "Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job="PMIX_NAMESPACE OMPI_MCA_ess_base_jobid",
    ),
    Launcher(
        "PALS",
        rank="PALS_RANKID",
        size="PALS_SIZE PMI_SIZE",
        local_rank="PALS_LOCAL_RANKID",
        local_size="PALS_LOCAL_SIZE PMI_LOCAL_SIZE",
        job="PALS_APID",
    ),
    Launcher(
        "MPICH (hydra)",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID PMI_LOCAL_RANK",
        local_size="MPI_LOCALNRANKS PMI_LOCAL_SIZE",
        own="MPI_LOCALRANKID PMI_LOCAL_RANK",
    ),
    Launcher(
        "Slurm",
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS SLURM_NTASKS SLURM_NPROCS",
        local_rank="SLURM_LOCALID",
        nodes="SLURM_STEP_NUM_NODES SLURM_NNODES SLURM_JOB_NUM_NODES",
    ),
)

# Ids of the whole job, for launchers that have none of their own.
JOB_IDS = "SLURM_JOB_ID PBS_JOBID LSB_JOBID JOB_ID"
NODE_LISTS = "SLURM_STEP_NODELIST SLURM_JOB_NODELIST SLURM_NODELIST"


@dataclass(frozen=True)
class Place:
    """This process in its job."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    host: str
    port: int


def find_place(environment: Mapping[str, str]) -> Place:
    """Returns the place that the variables of a launcher give to this process.

    Raises:
        RuntimeError: They are missing or make no sense; the message says what to do.
    """
    launcher = next((each for each in LAUNCHERS if each.has_started(environment)), None)
    if launcher is None:
        raise RuntimeError(
            "mpi://: none of the launchers' variables is set (OMPI_COMM_WORLD_RANK, PALS_RANKID, "
            "PMI_RANK, SLURM_PROCID). Start with `mpirun -n 2 python train.py` or `srun -n 2 "
            "python train.py`; torchrun needs no init_method"
        )
    rank = _number(environment, launcher.rank)
    size = _number(environment, launcher.size)
    if rank is None or size is None or not 0 <= rank < size:
        raise RuntimeError(
            f"mpi://: {launcher.name} says rank {rank} of {size} "
            f"({launcher.rank} and {launcher.size.replace(' ', ' or ')}): not usable"
        )
    local_size = _number(environment, launcher.local_size)
    nodes = _number(environment, launcher.nodes)
    if local_size is None and nodes == 1:
        local_size = size
    return Place(
        launcher.name,
        rank,
        size,
        _number(environment, launcher.local_rank),
        local_size,
        _host(environment, launcher, is_one_node=size == 1 or local_size == size),
        _port(environment, launcher),
    )


def _value(environment: Mapping[str, str], names: str) -> str:
    return next((environment[name] for name in names.split() if environment.get(name)), "")


def _number(environment: Mapping[str, str], names: str) -> int | None:
    text = _value(environment, names)
    return int(text) if re.fullmatch("[0-9]+", text) else None


def _host(environment: Mapping[str, str], launcher: Launcher, is_one_node: bool) -> str:
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    if is_one_node:
        return "127.0.0.1"
    if nodes := _value(environment, NODE_LISTS):
        return first_host(nodes)
    raise RuntimeError(
        f"mpi://: {launcher.name} says neither that all ranks are on one node nor where rank 0 is. "
        "Set MASTER_ADDR to its host name for all ranks, for example `mpirun -x MASTER_ADDR="
        "node1 ...` (Open MPI), `mpiexec -genv MASTER_ADDR node1 ...` (hydra), or `export "
        "MASTER_ADDR=$(head -n 1 $PBS_NODEFILE)` before mpiexec (PBS)"
    )


def first_host(nodes: str) -> str:
    """The first of Slurm's compressed list: "gpu[03-05,9],cpu1" -> "gpu03"."""
    expanded = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes)
    return expanded.split(",")[0]


def _port(environment: Mapping[str, str], launcher: Launcher) -> int:
    """MASTER_PORT, or one that follows from the id of the job."""
    if environment.get("MASTER_PORT"):
        port = _number(environment, "MASTER_PORT") or 0
        if not 0 < port < 65536:
            raise RuntimeError(f"mpi://: MASTER_PORT={environment['MASTER_PORT']} is no port")
        return port
    job = _value(environment, launcher.job) or _value(environment, JOB_IDS)
    if launcher.name == "Slurm":
        job += "." + environment.get("SLURM_STEP_ID", "")
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS if job.strip(".") else DEFAULT_PORT


def rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """torch's contract: yields (store, rank, world size) once."""
    from torch.distributed import TCPStore

    place = find_place(os.environ)
    for name, has in (("rank", place.rank), ("world_size", place.size)):
        asked = parse_qs(urlparse(url).query).get(name)
        if asked and int(asked[0]) != has:
            raise ValueError(f"mpi://: {place.launcher} says {name} {has}, the program {asked[0]}")
    try:
        store = TCPStore(place.host, place.port, place.size, place.rank == 0, timeout)
    except Exception as error:
        error.args = (
            f"mpi://: rank {place.rank} of {place.size} has no rendezvous store at {place.host} "
            f"port {place.port}: {error}. Rank 0 must run on that host, and the port be free "
            "there: MASTER_ADDR and MASTER_PORT choose others",
        )
        raise
    # torchrun sets these, too; programs and libraries read them.
    known: dict[str, int | None] = {"RANK": place.rank, "WORLD_SIZE": place.size}
    known |= {"LOCAL_RANK": place.local_rank, "LOCAL_WORLD_SIZE": place.local_size}
    for name, number in known.items():
        if number is not None:
            os.environ.setdefault(name, str(number))
    yield store, place.rank, place.size
    raise RuntimeError("mpi:// cannot meet a second time")
