"""Reads from the environment which place a launcher has given this process: srun, mpirun, or RANK
and WORLD_SIZE as PyTorch's own launchers and hand-made ones set them."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UserError
from .network import LOOPBACK
from .plan import SPECIAL_STEPS, first_node, number_of, port_of_job

TORCHRUN, SRUN = "torchrun", "srun"
PORT = 29500  # PyTorch's usual
# By the launcher: its variables for the rank, the number of processes, and both on this machine.
MPI = {
    "Open MPI": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    "MVAPICH": (
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        *("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
BY_HAND = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")


@dataclass(frozen=True)
class LaunchedAs:
    """The place of this process among those that train together.

    Attributes:
        rank, world_size: among all processes.
        local_rank, local_world_size: among those on this machine; None: not known before all have
            met.
        restarts: how often torchrun has restarted them after a failure.
        by: what has launched them, for messages; TORCHRUN's agent restarts processes.
        address, port: where rank 0 waits for the others; None: torchrun has set it.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    restarts: int = 0
    by: str = TORCHRUN
    address: str | None = None
    port: int | None = None

    @property
    def start(self) -> str:
        """Name of the current start of all processes, the same on each. On one machine torchrun's
        store survives a restart, with the keys that dead processes left in it, so the name has the
        number of restarts. On several machines, where these numbers may differ, and with other
        launchers, every start has a new store."""
        one_machine = self.by == TORCHRUN and self.local_world_size == self.world_size
        return f"start-{self.restarts}" if one_machine else "start"


def read_launch(environ: Mapping[str, str]) -> LaunchedAs | None:
    """The place of this process, with the address and port at which rank 0 waits for the others.

    RANK and WORLD_SIZE come first; then MPI's variables, since mpirun may itself use srun; then
    Slurm's. None: no launcher.

    Raises:
        UserError: the variables contradict each other, or one is missing.
    """
    environ = {name: value.strip() for name, value in environ.items() if value.strip()}
    found = _found(environ)
    place = _by_hand(environ, found)
    if place is None:
        return None
    rank, size, local_rank, local_size, by = place
    if found is not None and found[-1] in MPI:
        # mpirun starts its daemons on the other nodes by a step of srun, to which this node may or
        # may not belong. What the ranks have in common are the job's variables.
        environ = {n: value for n, value in environ.items() if not n.startswith("SLURM_STEP")}
    if rank >= size:
        raise UserError(f"{by}: rank {rank} of {size} processes; ranks are 0 to {size - 1}")
    if local_rank is not None and local_rank >= (local_size or size):
        raise UserError(
            f"{by}: process {local_rank} of {local_size or size} on its machine; they are numbered "
            f"from 0 to {(local_size or size) - 1}"
        )
    address = environ.get("MASTER_ADDR")
    if address is None and size > 1:
        address = _address(environ, rank, size, local_rank, local_size, by)
    # Without an address all are on one machine, where both numbers of a process are the same.
    if local_rank is None and address in (None, LOOPBACK, "localhost"):
        local_rank = rank
    port = number_of(environ, "MASTER_PORT", low=1, high=2**16 - 1)
    return LaunchedAs(
        *(rank, size, local_rank, local_size), by=by, address=address,
        port=_port(environ) if port is None else port,
    )  # fmt: skip


def refuse_many_launchers(environ: Mapping[str, str]) -> None:
    """Raises UserError if mpirun or srun has started run_distributed.sh several times, so that each
    would train a run of its own."""
    found = _found(environ)
    if found is None or found[1] == 1 or environ.get("NNODES"):
        return
    by, nodes = found[-1], environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "1")
    if by != SRUN or nodes == "1":
        raise UserError(
            f"{by} has started {found[1]} processes, and run_distributed.sh starts processes by "
            f"itself: let {SRUN if by == SRUN else 'mpirun'} start python ENTRY ... instead"
        )


def without_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that trains by itself, whoever has launched this one."""
    names = {*BY_HAND, *SLURM, "TORCHELASTIC_RESTART_COUNT", *sum(MPI.values(), ())}
    return {name: value for name, value in environ.items() if name not in names}


def gpu_of(place: LaunchedAs, gpus: int) -> int:
    """The number of this process's GPU, of those that it sees.

    Raises:
        UserError: there is none for it, or its local rank is not known.
    """
    if place.by != TORCHRUN and gpus == 1:  # srun --gpus-per-task=1 shows each task its own
        return 0
    if place.local_rank is None:
        raise UserError(
            f"{place.by}: this machine has {gpus} GPUs; set LOCAL_RANK in each process, its number "
            "on its machine from 0 on, which chooses its GPU"
        )
    if place.local_rank >= gpus:
        raise UserError(
            f"process {place.local_rank + 1} of this machine has no GPU of its own: there are "
            f"{gpus}; start fewer processes, or use --device cpu"
        )
    return place.local_rank


# ---- each kind of launcher: (rank, processes, local rank, local processes, its name) ------------


def _by_hand(environ: Mapping[str, str], found: tuple | None) -> tuple | None:
    """RANK and WORLD_SIZE, completed by what another launcher says."""
    rank, size, local_rank, local_size = (number_of(environ, name) for name in BY_HAND)
    if size == 0:
        raise UserError("WORLD_SIZE=0: it is the number of processes, 1 or more")
    for name, value, known in (("RANK", rank, 0), ("WORLD_SIZE", size, 1)):
        if found and value not in (None, found[known]) and None in (rank, size):
            number = found[known]
            raise UserError(
                f"{name}={value}, where {found[-1]} says {number}: unset {name}, or set both RANK "
                "and WORLD_SIZE"
            )
    if rank is not None and size is not None:
        others = found[2:4] if found and found[:2] == (rank, size) else (None, None)
        both = (local_rank, local_size)
        local = [other if mine is None else mine for mine, other in zip(both, others, strict=True)]
        return rank, size, *local, f"RANK={rank} and WORLD_SIZE={size}"
    if found is not None:
        return found
    if size is not None and size > 1:
        raise UserError(
            f"WORLD_SIZE={size} without RANK: set RANK, from 0 to {size - 1}, in each of the "
            f"{size} processes, or unset WORLD_SIZE; NPROC={size} bash run_distributed.sh ... "
            "starts them all"
        )
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank or None)):
        if value is not None and size is None:
            raise UserError(
                f"{name}={value} without WORLD_SIZE: set RANK and WORLD_SIZE, the number of "
                f"processes, in each process, or unset {name} to train in this one alone"
            )
    return None


def _found(environ: Mapping[str, str]) -> tuple | None:
    """What MPI's or Slurm's variables say."""
    found = _by_mpi(environ)
    if found is not None and found[2] is not None:
        return found
    slurm = _by_slurm(environ)  # srun --mpi=pmi2 sets PMI's variables, too, without a local rank
    return slurm if slurm and (found is None or found[:2] == slurm[:2]) else found


def _by_mpi(environ: Mapping[str, str]) -> tuple | None:
    for by, names in MPI.items():
        rank, size, local_rank, local_size = (number_of(environ, name) for name in names)
        if rank is None and size is None:
            continue
        if rank is None or not size:
            missing = names[0] if rank is None else names[1]
            raise UserError(
                f"{by} has not set {missing}: set RANK and WORLD_SIZE in each process instead"
            )
        return rank, size, local_rank, local_size, by
    return None


def _by_slurm(environ: Mapping[str, str]) -> tuple | None:
    """Inside a step of srun. The shells of sbatch and salloc have the variables of a task, too, but
    are in no step."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not step.isdigit() or int(step) >= SPECIAL_STEPS or "SLURM_PROCID" not in environ:
        return None
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    size = next((number_of(environ, name) for name in names if name in environ), 1)
    if size > 1 and "SLURM_PTY_PORT" in environ:
        raise UserError(
            f"srun --pty with {size} tasks gives only the first of them a terminal: start a shell "
            "by srun --ntasks=1 --pty, and a run of several tasks without --pty"
        )
    rank, local_rank = (number_of(environ, name) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    return rank, size, local_rank, None, SRUN


# ---- where rank 0 waits -------------------------------------------------------------------------


def _address(environ: Mapping[str, str], rank, size, local_rank, local_size, by: str) -> str:
    """Of the machine of rank 0, where MASTER_ADDR does not say it."""
    counts = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    nodes = next((environ[name] for name in counts if name in environ), None)
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    listed = next((environ[name] for name in names if name in environ), None)
    one_machine = nodes == "1" if local_size is None else local_size == size
    if one_machine:
        return LOOPBACK
    if listed:
        return first_node(listed)
    several = local_size is not None or nodes is not None or local_rank not in (None, rank)
    if several and by == SRUN and "SLURM_LAUNCH_NODE_IPADDR" in environ:
        return environ["SLURM_LAUNCH_NODE_IPADDR"]
    if several:
        raise UserError(
            f"{by}: the processes are on several machines; set MASTER_ADDR to the name of the one "
            "with rank 0, the same in all of them (mpirun: -x MASTER_ADDR=..., or -genv)"
        )
    return LOOPBACK


def _port(environ: Mapping[str, str]) -> int:
    """Where MASTER_PORT does not say it: derived from the number of the job, so that two jobs on a
    machine do not meet."""
    job = number_of(environ, "SLURM_JOB_ID")
    if job is not None:
        step = environ.get("SLURM_STEP_ID", "0")
        return port_of_job(job, int(step) if step.isdigit() and int(step) < SPECIAL_STEPS else 0)
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"):
        if name in environ:
            return port_of_job(zlib.crc32(environ[name].encode()), 0)
    return PORT
