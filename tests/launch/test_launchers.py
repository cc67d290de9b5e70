"""Which place a launcher's environment gives a process, and real processes in such environments."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from distributed.world import free_port
from patience import PATIENCE

from utils.errors import UserError
from utils.launch import environment
from utils.launch.flags import check_launch_flags, take_launch_flags, use_launch_flags
from utils.launch.launchers import (
    LaunchedAs,
    gpu_of,
    read_launch,
    refuse_many_launchers,
    without_launch,
)

ROOT = Path(__file__).resolve().parents[2]
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
JOB_PORT = 20000 + 4711
SLURM_PORT = JOB_PORT + 202
ONE_NODE = STEP | {"SLURM_NNODES": "1", "SLURM_PROCID": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
INTEL = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
HAND = {"RANK": "1", "WORLD_SIZE": "4"}


def mpirun(nodes: int, node: int, mpi=OPEN_MPI) -> dict:
    """On each of these nodes mpirun has started two ranks, on all but the first one by a daemon in
    a step of srun; this is the second rank of `node`. The batch script runs on the first one."""
    names = zip(mpi, (2 * node + 1, 2 * nodes, 1, 2), strict=True)
    job = {name: str(value) for name, value in names}
    job |= {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": str(2 * nodes)}
    of_job, of_step = f"gpu[07-{6 + nodes:02}]", "gpu08" if nodes == 2 else "gpu[08-09]"
    job |= {"SLURM_JOB_NODELIST": of_job, "SLURM_NODELIST": of_job}
    job |= dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), str(nodes))
    if node == 0:
        return job
    tasks = {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_STEP_NUM_NODES", "SLURM_NNODES"}
    step = {"SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": of_step, "SLURM_NODELIST": of_step}
    return job | step | dict.fromkeys(tasks, str(nodes - 1)) | {"SLURM_PROCID": str(node - 1)}


AT = {"MASTER_ADDR": "node1", "MASTER_PORT": "1234"}
# What PyTorchJob and DeepSpeed set, too.
ALL = HAND | AT | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        # (rank, processes, local rank, address, port)
        (STEP, (5, 8, 1, "gpu07", SLURM_PORT)),
        (ONE_NODE, (1, 8, 1, "127.0.0.1", SLURM_PORT)),
        (STEP | {"SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS": "8"}, (5, 6, 1, "gpu07", SLURM_PORT)),
        (STEP | AT, (5, 8, 1, "node1", 1234)),
        (STEP | {"WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (5, 8, 1, "gpu07", SLURM_PORT)),
        (STEP | {"RANK": "5", "WORLD_SIZE": "8"}, (5, 8, 1, "gpu07", SLURM_PORT)),
        (STEP | {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": "a[3,5],b"},
         (5, 8, 1, "a3", SLURM_PORT)),
        (STEP | {"SLURM_STEP_NODELIST": "", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7"},
         (5, 8, 1, "10.0.0.7", SLURM_PORT)),
        # srun --mpi=pmi2, which sets no local rank for MPI
        (STEP | {"PMI_RANK": "5", "PMI_SIZE": "8"}, (5, 8, 1, "gpu07", SLURM_PORT)),
        # mpirun starts its own daemons by srun, one on each other node
        (STEP | OPEN_MPI | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
         (3, 4, 3, "127.0.0.1", JOB_PORT)),
        (mpirun(2, 0), (1, 4, 1, "gpu07", JOB_PORT)),
        (mpirun(2, 1), (3, 4, 1, "gpu07", JOB_PORT)),
        (mpirun(2, 1) | {"SLURM_JOB_NUM_NODES": ""}, (3, 4, 1, "gpu07", JOB_PORT)),
        (mpirun(3, 0), (1, 6, 1, "gpu07", JOB_PORT)),
        (mpirun(3, 1), (3, 6, 1, "gpu07", JOB_PORT)),
        (mpirun(3, 2), (5, 6, 1, "gpu07", JOB_PORT)),
        (mpirun(2, 1, INTEL), (3, 4, 1, "gpu07", JOB_PORT)),
        (mpirun(2, 1) | {"RANK": "3", "WORLD_SIZE": "4"}, (3, 4, 1, "gpu07", JOB_PORT)),
        # without the local number of ranks
        (mpirun(2, 1, ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "none"]),
         (3, 4, 1, "gpu07", JOB_PORT)),
        (OPEN_MPI, (3, 4, 3, "127.0.0.1", 29500)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"} | AT,
         (3, 4, 1, "node1", 1234)),
        (INTEL, (3, 4, 3, "127.0.0.1", 29500)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2, 0, "127.0.0.1", 29500)),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, (1, 2, 1, "127.0.0.1", 29500)),
        (HAND, (1, 4, 1, "127.0.0.1", 29500)),
        (HAND | {"MASTER_PORT": " 1234 "}, (1, 4, 1, "127.0.0.1", 1234)),
        (HAND | {"LOCAL_RANK": "1"}, (1, 4, 1, "127.0.0.1", 29500)),
        (HAND | AT, (1, 4, None, "node1", 1234)),
        (ALL, (1, 4, 0, "node1", 1234)),
        # Processes that a task of srun starts by itself: two in each of two tasks.
        (STEP | HAND | {"LOCAL_RANK": "1"}, (1, 4, 1, "gpu07", SLURM_PORT)),
    ],
)  # fmt: skip
def test_the_place_of_a_process(environ, place):
    found = read_launch(environ)
    assert (found.rank, found.world_size, found.local_rank, found.address, found.port) == place
    assert read_launch(without_launch(environ)) is None


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0"},
        AT,
        {"RANK": "", "WORLD_SIZE": " "},
        # the shells of sbatch and of salloc, and a task of a job array
        {k: v for k, v in STEP.items() if k != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"},
        STEP | {"SLURM_STEP_ID": str(2**32 - 6)},
        {k: v for k, v in STEP.items() if k not in ("SLURM_STEP_ID", "SLURM_PROCID")},
        {"SLURM_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    ],
)
def test_a_process_alone_has_no_place(environ):
    assert read_launch(environ) is None


@pytest.mark.parametrize(
    "environ",
    [
        STEP | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_one_process_of_one_is_alone(environ, monkeypatch):
    assert read_launch(environ).world_size == 1
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert environment.launched() is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 without RANK: set RANK, from 0 to 3"),
        ({"RANK": "0"}, "RANK=0 without WORLD_SIZE: set"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 without WORLD_SIZE: set"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "rank 4 of 4 processes; ranks are 0 to 3"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: a whole number of 0 or more"),
        (HAND | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999: a whole number from 1 to 65535"),
        (ALL | {"LOCAL_RANK": "1"}, "process 1 of 1 on its machine"),
        (HAND | {"LOCAL_RANK": "0"}, "set MASTER_ADDR"),
        (STEP | {"WORLD_SIZE": "4"}, "WORLD_SIZE=4, where srun says 8: unset WORLD_SIZE"),
        (STEP | {"RANK": "0"}, "RANK=0, where srun says 5: unset RANK"),
        (STEP | {"SLURM_STEP_NODELIST": ""}, "set MASTER_ADDR"),
        (STEP | {"SLURM_PTY_PORT": "1"}, "srun --ntasks=1 --pty"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "has not set OMPI_COMM_WORLD_RANK: set RANK"),
        ({"PMI_RANK": "4"}, "has not set PMI_SIZE: set RANK"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
         "set MASTER_ADDR"),
    ],
)  # fmt: skip
def test_contradictions_say_what_to_set(environ, message):
    with pytest.raises(UserError) as error:
        read_launch(environ)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("environ", [OPEN_MPI, INTEL, ONE_NODE])
def test_the_launcher_is_started_once_on_a_node(environ):
    with pytest.raises(UserError, match="starts processes by itself"):
        refuse_many_launchers(environ)
    refuse_many_launchers(environ | {"NNODES": "4"})
    refuse_many_launchers(STEP)  # one on each node: plan.py counts them


def test_the_gpu_of_a_process():
    place = LaunchedAs(3, 4, 1, 2, by="srun")
    assert gpu_of(place, 2) == 1
    assert gpu_of(place, 1) == 0  # the only one that its task sees
    for other, gpus in ((LaunchedAs(3, 4, 3, 4), 1), (place, 0), (LaunchedAs(1, 2, 2, 4), 2)):
        with pytest.raises(UserError, match="no GPU of its own"):
            gpu_of(other, gpus)
    with pytest.raises(UserError, match="set LOCAL_RANK"):
        gpu_of(LaunchedAs(3, 4, None, None, by="RANK=3"), 8)


# ---- flags --------------------------------------------------------------------------------------

ALONE, TWO = None, LaunchedAs(1, 2, 1, 2, by="srun", address="node1", port=1234)


def told(place, *argv, visible=None) -> str | None:
    left, flags = take_launch_flags(["--lr", "1", *argv, "--bs", "8"], ())
    assert left == ["--lr", "1", "--bs", "8"]
    return check_launch_flags(flags, place, visible)


def test_flags_that_agree_with_the_environment_are_not_used():
    assert told(ALONE) is told(ALONE, "--local_rank", "0") is told(TWO, "--local-rank=7") is None
    assert told(ALONE, "--world-size=1", "--rank", "0", "--gpu_ids", "0") == (
        "note: --rank, --world_size, --gpu_ids: not used; this process is alone"
    )
    assert told(TWO, "--world_size", "2", "--host=h", "--port", "1", "--dist_url", "env://") == (
        "note: --world_size, --dist_url, --host, --port: not used; the processes meet at "
        "node1:1234, as the environment says"
    )
    assert told(TWO, "--rank", "-1", "--gpu_ids", "0", "1") and told(TWO, "--gpu_ids", "0,1")
    assert told(ALONE, "--gpu_ids", "3", visible="3")
    assert told(ALONE, "--world_size=", "--host=") is None  # =$NAME of a variable that is not set
    assert take_launch_flags(["pictures", "--gpu_ids", "0", "1"], ()) == (
        ["pictures"],
        {"gpu_ids": "0,1"},
    )
    assert take_launch_flags(["--gpu-ids", "0", "1", "pictures"], ()) == (
        ["pictures"],
        {"gpu_ids": "0,1"},
    )
    assert take_launch_flags(["--gpu_ids", "", "pictures"], ()) == (["pictures"], {})
    assert told(ALONE, "--gpu_ids", "0,") and told(TWO, "--gpu_ids", "0, 1")
    assert told(TWO, "--world_size", "02", "--rank", "01")
    assert told(ALONE, "--gpu_ids", "2,3", visible="2, 3")
    assert told(ALONE, "--host=") is None  # --host=$HOST where that is not set


@pytest.mark.parametrize(
    ("place", "argv", "message"),
    [
        (ALONE, ["--world_size", "4"], "NPROC=4 bash run_distributed.sh"),
        (ALONE, ["--world_size", "two"], "--world_size two: a whole number is needed"),
        (ALONE, ["--rank", "1"], "or give --world_size, --rank and --dist_url tcp://HOST:PORT"),
        (ALONE, ["--local_rank", "1"], "process 0 of 1; start the processes by NPROC=N"),
        (ALONE, ["--gpu_ids", "0,1"], "CUDA_VISIBLE_DEVICES=0,1 bash run_distributed.sh"),
        (ALONE, ["--gpu_ids", "2"], "CUDA_VISIBLE_DEVICES=2 python"),
        (ALONE, ["--gpu_ids", "-1"], "--device cpu"),
        (TWO, ["--world_size", "4"], "process 1 of 2; remove the flag, as the launcher"),
        (TWO, ["--rank", "0"], "--rank 0: by the environment this is process 1 of 2; remove"),
        (TWO, ["--gpu_ids", "0"], "CUDA_VISIBLE_DEVICES=0"),
        (TWO, ["--world_size"], "--world_size needs a value"),
        (TWO, ["--world_size", "x"], "--world_size x: a whole number is needed"),
    ],
)
def test_flags_that_contradict_the_environment_are_refused(place, argv, message):
    with pytest.raises(UserError) as error:
        told(place, *argv)
    assert message in str(error.value)


def test_a_setting_of_the_entry_keeps_its_name():
    assert take_launch_flags(["--port", "1"], {"port"}) == (["--port", "1"], {})


def used(monkeypatch, *argv, **environ) -> tuple[dict, dict]:
    """(the variables that are set, the flags that are left) in a process without a launcher."""
    set_here = dict(environ)
    monkeypatch.setattr(os, "environ", set_here)
    flags = take_launch_flags([*map(str, argv)], ())[1]
    use_launch_flags(flags, ["--lr", "1"])
    return {name: value for name, value in set_here.items() if name not in environ}, flags


def test_without_a_launcher_flags_say_where_the_processes_meet(monkeypatch):
    two = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    place = ["--world_size", 2, "--rank", 1]
    assert used(monkeypatch, *place, "--dist_url", "tcp://node1:29500") == (two, {})
    assert used(monkeypatch, *place, "--host", "node1", "--port", 29500) == (two, {})
    local = used(monkeypatch, *place, "--dist_url=tcp://[fe80::1]:1", "--local_rank", 0)[0]
    assert local == two | {"MASTER_ADDR": "fe80::1", "MASTER_PORT": "1", "LOCAL_RANK": "0"}
    # Not all is said, or a launcher says it.
    for less in (place, ["--world_size", 2, "--host", "node1"], ["--rank", 0, "--host", "node1"]):
        assert used(monkeypatch, *less)[0] == {}
    assert used(monkeypatch, "--world_size", 2, "--rank", -1, "--host", "node1")[0] == {}
    torchrun = dict.fromkeys(("RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"), "0")
    torchrun |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    flags = ["--world_size", 2, "--rank", 0, "--host", "elsewhere", "--gpu_ids", "0,1"]
    set_here, left = used(monkeypatch, *flags, **torchrun)
    assert set_here == {} and len(left) == 4
    with pytest.raises(UserError, match="--dist_url file:///x: tcp://HOST:PORT is needed"):
        used(monkeypatch, *place, "--dist_url", "file:///x")


def test_without_a_launcher_gpu_ids_choose_the_gpus(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/scripts/vit_test.py"])
    assert used(monkeypatch, "--gpu_ids", "3") == ({"CUDA_VISIBLE_DEVICES": "3"}, {})
    # What the user has set stays, and is compared with the flag later.
    kept = used(monkeypatch, "--gpu_ids", "3", CUDA_VISIBLE_DEVICES="2")
    assert kept == ({}, {"gpu_ids": "3"})
    with pytest.raises(UserError, match="--gpu_ids cuda:1: numbers of GPUs are needed"):
        used(monkeypatch, "--gpu_ids", "cuda:1")
    started = []
    monkeypatch.setattr(os, "execvp", lambda program, words: started.append(words))
    set_here = used(monkeypatch, "--gpu_ids", "0,2")[0]
    own = {"NPROC": "2", "PYTHON": sys.executable}
    assert set_here == own | {"CUDA_VISIBLE_DEVICES": "0,2"}
    command = ["bash", str(ROOT / "run_distributed.sh"), "/scripts/vit_test.py", "--lr", "1"]
    assert started == [command]
    used(monkeypatch, "--gpu_ids", "0,2", CUDA_VISIBLE_DEVICES="0,1")  # refused later
    place = ["--world_size", 2, "--rank", 1, "--host", "node1"]
    assert used(monkeypatch, "--gpu_ids", "0,1", *place)[0]["RANK"] == "1"
    assert started == [command]


# ---- real processes -----------------------------------------------------------------------------

RUN = [
    "resnet50_test.py", "--dataset", "shapes", "--depth", "18", "--width", "4", "-b", "8",
    "--subset", "16", "--epochs", "1", "--threads", "1", "--device", "cpu", "--eval_every", "0",
]  # fmt: skip


def launch(environs: list[dict], *arguments) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of a process for each of these environments, all at once."""
    base = without_launch(os.environ)
    base = {name: value for name, value in base.items() if not name.startswith(("SLURM", "MASTER"))}
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, arguments)], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=base | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | environ,
        )
        for environ in environs
    ]  # fmt: skip
    try:
        ends = [process.communicate(timeout=PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, *end) for p, end in zip(processes, ends, strict=True)]


def check_one_run(ends, output: Path, silent: bool = True) -> None:
    """Asserts that two processes have trained one run, of which the first one told."""
    assert [code for code, *_ in ends] == [0] * len(ends), ends
    if silent:
        said = [line for line in ends[1][1].splitlines() if not line.startswith("[Gloo]")]
        assert (said, ends[1][2]) == ([], "")  # PyTorch 2.10's Gloo prints a line by itself
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["world_size"], summary["global_batch_size"]) == (2, 16)
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def slurm(rank: int) -> dict:
    return {
        "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2", "SLURM_NODEID": "0", "SLURM_NNODES": "1",
    }  # fmt: skip


@pytest.mark.slow
def test_tasks_train_one_run(tmp_path):
    """As srun starts them; what others say is read by the same function, tested above."""
    output, shared = tmp_path / "runs" / "one", {"MASTER_PORT": str(free_port())}
    ends = launch(
        [slurm(rank) | shared for rank in range(2)],
        *(*RUN, "--output", output, "--world_size", 2, "--host", "somewhere"),
    )
    check_one_run(ends, output)
    assert ends[0][1].startswith("note: --world_size, --host: not used; the processes meet at 127.")


# Each of the processes gives its own --rank, as two people at two machines do.
WITH_RANK = """
import os, sys
os.execv(sys.executable, [sys.executable, *sys.argv[1:], "--rank", os.environ["OWN_RANK"]])
"""


@pytest.mark.slow
def test_processes_that_meet_by_flags_alone_train_one_run(tmp_path):
    output, url = tmp_path / "runs" / "one", f"tcp://127.0.0.1:{free_port()}"
    words = [*RUN, "--output", output, "--world_size", 2, "--dist_url", url]
    environs = [{"OWN_RANK": str(rank)} for rank in range(2)]
    check_one_run(launch(environs, "-c", WITH_RANK, *words), output)


@pytest.mark.slow
def test_several_gpu_ids_start_a_process_each(tmp_path):
    """There is no GPU, so both train on the CPU."""
    output = tmp_path / "runs" / "one"
    ends = launch([{}], *RUN, "--output", output, "--gpu_ids", "0", "1")
    check_one_run(ends, output, silent=False)
    assert ends[0][1].startswith("note: --gpu_ids 0,1: run_distributed.sh starts a process on each")


@pytest.mark.slow
def test_pytorchs_old_launcher_trains_one_run(tmp_path):
    """The new one is what run_distributed.sh starts."""
    output = tmp_path / "runs" / "one"
    ends = launch(
        [{}], "-m", "torch.distributed.launch", "--nproc_per_node=2",
        f"--master_port={free_port()}", *RUN, "--output", output, "--world_size", "2",
    )  # fmt: skip
    check_one_run(ends, output, silent=False)


@pytest.mark.slow
def test_processes_that_cannot_meet_say_why(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port}
        ((code, _, err),) = launch([environ], *RUN, "--output", tmp_path / "a")
    assert code == 2 and "set another MASTER_PORT" in err and err.count("\n") == 1
