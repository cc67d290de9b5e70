"""Starts the processes of an entry script on this node; run_distributed.sh runs this module.

torchrun does the work. This module reads the environment (plan.py), checks the entry's settings
once, chooses the run's folder, and prints in a line each what it starts and why that ended.
"""

import dataclasses
import importlib.util
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..errors import UserError, one_line
from ..machine.cores import usable_cores
from ..machine.packages import mendable
from ..place import ENTRIES, RECIPES, as_called, launcher_command
from ..plural import counted
from ..reporting.console import print_line
from ..reporting.run_folder import default_path, find_run, free_path, refuse_run
from ..settings.config import COMMAND_LINE, DEFAULT, HOST, fields, parse, read_yaml
from .agent import run_agent
from .environment import LAUNCH_FOLDER, LAUNCH_RUN
from .flags import take_launch_flags
from .hosts import (
    FOLLOW_STDIN,
    SSH,
    follow_stdin,
    node_commands,
    read_hosts,
    run_nodes,
)
from .launchers import refuse_many_launchers
from .network import (
    LOOPBACK,
    choose_interface,
    local_address,
    refuse_taken_port,
)
from .plan import VARIABLES, Plan, read_plan
from .signals import stopping_signals

ENTRY = "resnet50_test.py"
ON_GPUS = ["--ngd", "--meta_learning"]
DEMO = ["--config", str(RECIPES / "distributed_demo.yaml")]
AFTER_RESNET = "\nThe Transformer: bash run_distributed.sh transformer_test.py --ngd --bs 64"
AFTER_DEMO = """
That was the demo, on built-in pictures: there is no GPU here. Any entry takes any of its flags:
  bash run_distributed.sh resnet50_test.py --ngd --meta_learning --dataset cifar10
  bash run_distributed.sh transformer_test.py --ngd --bs 64
  NPROC=4 bash run_distributed.sh resnet50_test.py --config recipes/distributed_demo.yaml
Several nodes, Slurm, and what goes wrong: docs/distributed.md"""


@dataclasses.dataclass
class Job:
    """What every process runs: `script` with `flags`.

    Attributes:
        folder: of the run; None if nothing is trained.
        folder_is_given: by the user.
        resumed: the run in the folder is resumed.
        checks: --check is given.
        trains_locally: with --strategy local.
        workers: the value of --local_workers; None: a worker for each process.
        folder_is_typed: on the command line; else a new run may be in another folder.
    """

    script: Path
    flags: list[str]
    folder: str | None
    folder_is_given: bool
    resumed: bool
    device: str
    checks: bool = False
    trains_locally: bool = False
    workers: int | None = None
    folder_is_typed: bool = True


def main(argv: list[str]) -> int:
    if argv[:1] in (["-h"], ["--help"]):
        print_line(Path(__file__).with_name("help.txt").read_text().rstrip(), sys.stdout)
        return 0
    # PyTorch reads this variable when it is imported. Each of its C++ warnings about a closed
    # connection fills a screen; the launcher and the workers say in one line what has happened.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for signum in stopping_signals():
        signal.signal(signum, _stop_before_launch)
    if os.environ.pop(FOLLOW_STDIN, None):
        follow_stdin()
    try:
        if os.environ.get("HOSTFILE"):
            return launch_on_hosts(argv, os.environ)
        job, plan, demo = prepare(argv, os.environ)
    except (UserError, ModuleNotFoundError) as error:
        print(f"error: {one_line(mendable(error) or error)}", file=sys.stderr)
        return 2
    code = launch(job, plan, argv)
    if code == 0 and not argv:
        print_line(AFTER_DEMO if demo else AFTER_RESNET, sys.stdout)
    return code


def prepare(argv: list[str], environ: Mapping[str, str]) -> tuple[Job, Plan, bool]:
    """(what every process runs, how many processes there are, whether it is the demo for machines
    without a GPU).

    Raises:
        UserError: a flag or a variable is wrong.
    """
    refuse_many_launchers(environ)
    entry, flags, demo = _split(argv)
    job = check(find_entry(entry), flags)
    two = demo or job.checks
    if job.device == "cpu":  # the node's GPUs say nothing about the number of processes
        environ = {n: value for n, value in environ.items() if n != "SLURM_GPUS_ON_NODE"}
    plan = read_plan(
        environ, lambda: _gpus(job.device), usable_cores(), without_gpu=2 if two else 1
    )
    if job.checks:  # what has failed would fail after a restart, too
        plan = dataclasses.replace(plan, restarts=0)
    # A requeued job of Slurm gives the same command again: its processes resume the run.
    requeued = environ.get("SLURM_RESTART_COUNT", "") not in ("", "0")
    if job.folder and plan.max_nodes == 1 and not job.resumed and not requeued:
        if job.folder_is_typed:
            refuse_run(Path(job.folder))
        else:
            job.folder = str(free_path(Path(job.folder), environ, print))
            job.flags += ["--output", job.folder]
    if plan.max_nodes > 1:
        need_shared_folder(job)
    need_workers(job, plan)
    gpus = _gpus(job.device) if environ.get("NPROC") else plan.processes
    if 0 < gpus < plan.processes:
        raise UserError(
            f"NPROC={plan.processes}: this machine has {gpus} GPUs, and each process needs one; "
            "--device cpu trains without"
        )
    if plan.is_host:
        refuse_taken_port(plan.port)
    return job, plan, demo


def need_shared_folder(job: Job) -> None:
    if job.folder and not job.folder_is_given:
        raise UserError(
            "several nodes need --output FOLDER, a folder that all of them share: every node "
            "continues the run in it"
        )


def need_workers(job: Job, plan: Plan) -> None:
    """Raises UserError if nodes may join a run with local steps that has no workers for them: their
    number is fixed at the run's start."""
    most = plan.max_nodes * plan.processes
    if job.trains_locally and plan.min_nodes < plan.max_nodes and (job.workers or 0) < most:
        raise UserError(
            f"NNODES={plan.nodes} with --strategy local needs --local_workers {most} or more: one "
            "for each process that may join"
        )


def launch_on_hosts(argv: list[str], environ: Mapping[str, str]) -> int:
    """Starts this launcher on each node of HOSTFILE; returns the exit code (hosts.py)."""
    refuse_many_launchers(environ)
    hosts = read_hosts(Path(environ["HOSTFILE"]))
    entry, flags, _ = _split(argv)
    job = check(find_entry(entry), flags)
    if len(hosts) > 1:
        need_shared_folder(job)
    if shutil.which(SSH[0]) is None:
        raise UserError("HOSTFILE needs ssh, which is not installed here")
    folder = os.environ.get("PWD") or os.getcwd()  # PWD: as the user knows it, with links
    commands = node_commands(hosts, launcher_command(), argv, environ, folder)
    print_line(f"nodes by ssh: {', '.join(host.name for host in hosts)}", sys.stdout)
    variables = [f"{n}={environ[n]}" for n in (*VARIABLES, "HOSTFILE") if environ.get(n)]
    again = as_called(shlex.join([*variables, "bash", "run_distributed.sh", *argv]))
    return run_nodes(hosts, commands, f"go on with the same command: {again}")


def launch(job: Job, plan: Plan, argv: list[str]) -> int:
    """Runs the job as planned; returns the exit code (agent.py).

    Args:
        argv: to print the command that continues the run after a failure.
    """
    address = local_address(plan.host, plan.port)
    arguments = plan.torchrun(address, str(job.script), job.flags)
    print_line("torchrun " + shlex.join(arguments), sys.stdout)
    print_line(f"{plan}; the run's folder: {job.folder or 'none'}", sys.stdout)
    go_on = how_to_go_on(job, plan, argv)
    folder = tempfile.mkdtemp(prefix="launch-")
    os.environ[LAUNCH_FOLDER] = folder
    os.environ.pop(LAUNCH_RUN, None)
    if job.folder is not None:
        os.environ[LAUNCH_RUN] = os.path.abspath(job.folder)
    os.environ["OMP_NUM_THREADS"] = str(plan.threads)
    remote = None
    if plan.max_nodes == 1:
        choose_interface(LOOPBACK)
    else:
        remote = plan.host, plan.port
        choose_interface(address)
        # The store that agents share with their workers has keys with the agent's number of
        # failures, which differs between nodes. Unshared, rank 0 opens a new store each time.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        return run_agent(arguments, plan.restarts, remote, go_on)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def how_to_go_on(job: Job, plan: Plan, argv: list[str]) -> str:
    """For an error line: the command that continues the run."""
    command = [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)]
    command += ["bash", "run_distributed.sh"]
    if plan.max_nodes > 1:
        again = shlex.join(command + argv)
        if plan.min_nodes < plan.max_nodes:
            least = counted(plan.min_nodes, "node")
            return (
                f"go on with the same command, on {least} or more with that of RDZV_ENDPOINT among "
                f"them: {again}"
            )
        return f"when all nodes are up again, give the same command on each: {again}"
    if job.folder is None:
        return "nothing was trained"
    again = shlex.join([*command, job.script.name, "--resume", job.folder])
    return as_called(f"resume with {again}")


# ---- what is run --------------------------------------------------------------------------------


def _split(argv: list[str]) -> tuple[str, list[str], bool]:
    """(entry, its flags, whether it is the demo for machines without a GPU) of a command line."""
    if not argv:
        demo = _gpus("auto") == 0
        return ENTRY, DEMO if demo else ON_GPUS, demo
    if argv[0].startswith("-"):
        return ENTRY, argv, False
    return argv[0], argv[1:], False


def find_entry(name: str) -> Path:
    """The script of this name in the current folder, or an entry of the project; resnet50 is
    short for resnet50_test.py."""
    for path in (Path(name), ENTRIES / name, ENTRIES / f"{name}_test.py"):
        if path.is_file():
            return path.absolute()
    known = ", ".join(sorted(path.name for path in ENTRIES.glob("*_test.py")))
    raise UserError(f"{name}: there is no such script here or in {ENTRIES}, which has {known}")


def check(script: Path, flags: list[str]) -> Job:
    """Checks the flags as the entry would, and adds what its processes need: --distributed, and the
    run's folder, which a restarted process must find.

    Raises:
        UserError: a flag is wrong, or the script is not an entry.
    """
    module = _load(script)
    if hasattr(module, "as_entry"):  # train.py
        name, flags = module.as_entry(flags)
        script = script.with_name(f"{name}.py")
        module = _load(script)
    if not hasattr(module, "Settings"):
        raise UserError(f"{script}: not an entry script, as it has no class Settings")
    flags = list(flags)
    if "distributed" in fields(module.Settings):
        _refuse_alone(script, flags)
        flags.append("--distributed")
    description = (module.__doc__ or script.name).splitlines()[0]
    # Whether the others contradict the environment is said by the processes.
    settings, origin = parse(
        module.Settings, take_launch_flags(flags, fields(module.Settings))[0], description
    )
    folder = settings.output  # set also when a run is resumed
    folder_is_given = folder is not None
    if not settings.action.trains:
        folder = None
    elif origin["output"] in (DEFAULT, HOST):
        folder = folder or str(default_path(script.stem, settings.dataset))
        flags += ["--output", folder]
    resumed = settings.resume is not None and folder is not None
    if resumed:  # --resume A --output B goes on with A in a new folder
        run = find_run(settings.resume, settings.output, getattr(module.Settings, "entry", ""))
        resumed = run.resolve() == Path(folder).resolve()
    return Job(
        script, flags, folder, folder_is_given, resumed, settings.device, bool(settings.check),
        settings.action.trains and settings.trains_locally, _workers(settings, folder),
        folder_is_typed=origin["output"] == COMMAND_LINE,
    )  # fmt: skip


def _workers(settings, folder: str | None) -> int | None:
    """The value of --local_workers, or what the run in the folder has if it goes on there."""
    config = Path(folder or "") / "config.yaml"
    if settings.local_workers or not settings.trains_locally or not config.is_file():
        return settings.local_workers
    return read_yaml(type(settings), config).get("local_workers")


def _refuse_alone(script: Path, flags: list[str]) -> None:
    for flag in ("--no_distributed", "--no-distributed"):
        if flag in flags:
            raise UserError(
                f"{flag}: run_distributed.sh trains one run in all processes; for a run of its own "
                f"in this process call python {script.name}"
            )


def _load(script: Path):
    """The script as a module, with its folder in sys.path, as when Python runs it."""
    sys.path.insert(0, str(script.parent))
    sys.argv[0] = str(script)  # --help names it
    spec = importlib.util.spec_from_file_location("launched_entry", script)
    if spec is None or spec.loader is None:
        raise UserError(f"{script}: not a Python script")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


# ---- the machine --------------------------------------------------------------------------------


def _gpus(device: str) -> int:
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def _stop_before_launch(signum, frame) -> None:
    print("stopped before the launch", file=sys.stderr)
    sys.exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
