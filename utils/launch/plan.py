"""Reads from the environment how many processes to start, and how the nodes find each other."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import UserError
from ..plural import counted

# In seconds. The loss of a node is noticed after KEEP_ALIVE * MISSED; where NNODES allows fewer
# nodes, the rest then waits LAST_CALL for others to join. Together well below a minute.
KEEP_ALIVE, MISSED, LAST_CALL = 5, 3, 10
READ = 20  # timeout for an answer from the rendezvous
JOIN = 600  # how long a node waits for the others
# Below the ports that Linux uses for outgoing connections (from 32768).
FIRST_PORT, PORTS = 20000, 12000
# Steps that Slurm itself makes, for the shell of sbatch or salloc, have numbers from here on.
SPECIAL_STEPS = 2**32 - 16
# The user's environment variables. Those that are set are part of the command that continues a run.
VARIABLES = (
    *("NPROC", "NNODES", "NODE_RANK", "RDZV_ENDPOINT", "RDZV_ID", "JOIN_TIMEOUT"),
    *("MAX_RESTARTS", "OMP_NUM_THREADS"),
)


@dataclass(frozen=True)
class Plan:
    """What is started on this node.

    Attributes:
        processes: on this node.
        threads: CPU threads of each process.
        min_nodes, max_nodes: how many nodes may train together.
        restarts: failures of a process that lead to a restart; the next one ends the launch.
        run_id: the same on all nodes.
        endpoint: host:port of the rendezvous; None on a single node.
        is_host: whether this node hosts the rendezvous; None: PyTorch compares host names.
        join: seconds for which a node waits for the others.
    """

    processes: int
    threads: int
    min_nodes: int = 1
    max_nodes: int = 1
    restarts: int = 3
    run_id: str = "training"
    endpoint: str | None = None
    is_host: bool | None = None
    join: int = JOIN

    @property
    def host(self) -> str:
        """Name or address of the machine that hosts the rendezvous."""
        return self.endpoint.rpartition(":")[0].strip("[]") if self.endpoint else "127.0.0.1"

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2]) if self.endpoint else 0

    @property
    def nodes(self) -> str:
        """As torchrun's --nnodes takes it."""
        fixed = self.min_nodes == self.max_nodes
        return str(self.min_nodes) if fixed else f"{self.min_nodes}:{self.max_nodes}"

    def torchrun(self, local_address: str, script: str, flags: list[str]) -> list[str]:
        """The arguments of torchrun; other nodes reach this one at `local_address`."""
        settings = {
            "keep_alive_interval": KEEP_ALIVE,
            "keep_alive_max_attempt": MISSED,
            "last_call_timeout": LAST_CALL,
            "join_timeout": self.join,
            "read_timeout": READ,
        }
        if self.is_host is not None:
            settings["is_host"] = int(self.is_host)
        return [
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.processes}",
            f"--max-restarts={self.restarts}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.endpoint or '127.0.0.1:0'}",
            f"--rdzv-id={self.run_id}",
            "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in settings.items()),
            f"--local-addr={local_address}",
            "--log-dir=/dev/null",
            script,
            *flags,
        ]

    def __str__(self) -> str:
        processes = counted(self.processes, "process")
        threads = counted(self.threads, "thread") + (" each" if self.processes > 1 else "")
        restarts = f"up to {counted(self.restarts, 'restart')}" if self.restarts else "no restarts"
        if self.max_nodes == 1:
            return f"1 node, {processes} with {threads}; {restarts}"
        here = f"{self.nodes} nodes, on this one {processes} with {threads}"
        return f"{here}; {restarts}; rendezvous: {self.endpoint}"


def read_plan(
    environ: Mapping[str, str], gpus: Callable[[], int], cores: int, without_gpu: int = 1
) -> Plan:
    """The plan given by NPROC, NNODES, ... (docs/distributed.md); within a Slurm allocation Slurm's
    variables are the defaults.

    Args:
        gpus: counts this machine's GPUs; called only if no variable says how many processes.
        cores: CPU cores that may be used.
        without_gpu: processes on a machine without a GPU.

    Raises:
        UserError: a value makes no sense, or a needed one is missing.
    """
    environ = {name: value.strip() for name, value in environ.items() if value.strip()}
    if "SLURM_JOB_ID" in environ:
        environ = _without_shell(environ)
        environ = _from_slurm(environ) | environ
        cores = number_of(environ, "SLURM_CPUS_PER_TASK", cores, low=1)
    processes = number_of(environ, "NPROC", low=1) or gpus() or without_gpu
    threads = number_of(environ, "OMP_NUM_THREADS", max(1, cores // processes), low=1)
    least, most = _nodes(environ.get("NNODES", "1"))
    restarts = number_of(environ, "MAX_RESTARTS", 3)
    if most == 1:
        return Plan(processes, threads, restarts=restarts)
    node_rank = number_of(environ, "NODE_RANK")
    if node_rank is not None and node_rank >= most:
        raise UserError(f"NODE_RANK={node_rank}: with {most} nodes it is {most - 1} at most")
    return Plan(
        processes,
        threads,
        min_nodes=least,
        max_nodes=most,
        restarts=restarts,
        run_id=environ.get("RDZV_ID", "training"),
        endpoint=_endpoint(environ, most),
        is_host=None if node_rank is None else node_rank == 0,
        join=number_of(environ, "JOIN_TIMEOUT", JOIN, low=1),
    )


def _without_shell(environ: dict[str, str]) -> dict[str, str]:
    """Without the step that is the shell of salloc (LaunchParameters=use_interactive_step), on one
    of the job's nodes."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not step.isdigit() or int(step) < SPECIAL_STEPS:
        return environ
    job = {name: value for name, value in environ.items() if not name.startswith("SLURM_STEP")}
    if "SLURM_JOB_NUM_NODES" in job:  # SLURM_NNODES may be that of the step
        job["SLURM_NNODES"] = job["SLURM_JOB_NUM_NODES"]
    return job


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Defaults of the user's variables, from Slurm's."""
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "1")
    found = {"NNODES": nodes}
    if "SLURM_GPUS_ON_NODE" in environ:
        found["NPROC"] = environ["SLURM_GPUS_ON_NODE"]
    if nodes == "1" or environ.get("NNODES") == "1":
        return found
    # The user says where the nodes meet, and may have started them otherwise than by srun.
    meet_elsewhere = {"NNODES", "RDZV_ENDPOINT"} <= {*environ}
    job = number_of(environ, "SLURM_JOB_ID", 0)  # it is there
    step = number_of(environ, "SLURM_STEP_ID")
    if step is None and meet_elsewhere:
        return found
    if step is None:
        raise UserError(
            f"this Slurm allocation has {nodes} nodes, and this command runs on one of them: "
            "start it on all with srun --ntasks-per-node=1 bash run_distributed.sh ..."
        )
    tasks = number_of(environ, "SLURM_STEP_NUM_TASKS", low=1)
    if tasks is not None and str(tasks) != nodes and not meet_elsewhere:
        raise UserError(
            f"srun has started {counted(tasks, 'task')} on {nodes} nodes, where one on each node "
            "is needed, which starts the processes there: srun --ntasks-per-node=1"
        )
    names = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if names:
        found["RDZV_ENDPOINT"] = f"{first_node(names)}:{port_of_job(job, step)}"
    elif "RDZV_ENDPOINT" not in environ:
        raise UserError("SLURM_JOB_NODELIST is missing: set RDZV_ENDPOINT=host:port")
    found["RDZV_ID"] = f"slurm-{job}-{step}"
    if "SLURM_NODEID" in environ:
        found["NODE_RANK"] = environ["SLURM_NODEID"]
    return found


def port_of_job(job: int, step: int) -> int:
    """The same on all nodes; another one for another job or step, nearly always."""
    return FIRST_PORT + (job + 101 * step) % PORTS


def first_node(names: str) -> str:
    """The first node of a list in Slurm's notation: "gpu[07-09,12],login1" -> "gpu07"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", names)[0]  # type: ignore[index]  # it always matches
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def _nodes(text: str) -> tuple[int, int]:
    """ "2" -> (2, 2); "1:4" -> (1, 4)."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise UserError(f"NNODES={text}: a number of nodes is needed, or a range such as 1:4")
    return least, most


def _endpoint(environ: Mapping[str, str], nodes: int) -> str:
    text = environ.get("RDZV_ENDPOINT")
    if text is None:
        raise UserError(
            f"NNODES={environ['NNODES']} needs RDZV_ENDPOINT=host:port, the same on all nodes: a "
            "node that all reach by this name, and a free port there"
        )
    match = re.fullmatch(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):(\d+)", text)
    if not match or not 0 < int(match[1]) < 2**16:
        raise UserError(f"RDZV_ENDPOINT={text}: host:port is needed, as in node1:29400")
    return text


def number_of(
    environ: Mapping[str, str], name: str, default=None, low: int = 0, high: int | None = None
):
    """The value of a variable, from `low` to `high` (None: no limit); `default` where it is not
    set. Raises UserError."""
    text = environ.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= (high or int(text)):
        limits = f"from {low} to {high}" if high else f"of {low} or more"
        raise UserError(f"{name}={text}: a whole number {limits} is needed")
    return int(text)
