"""run_distributed.sh with an entry that does not train: what it starts, prints and returns."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from launch.script_runs import ENTRY, ROOT, alive
from patience import PATIENCE, wait_until
from quick_runs import handlers_put_back

from utils import entry
from utils.errors import UserError
from utils.launch import launcher
from utils.launch.launcher import Job
from utils.launch.launchers import LaunchedAs
from utils.launch.plan import Plan


@pytest.mark.slow
def test_processes_are_started_on_loopback(launches):
    code, out, err = launches.run(ENTRY, "--epochs", "3", OMP_NUM_THREADS="3")
    assert (code, err) == (0, "")
    command, plan = out.splitlines()
    assert command.startswith("torchrun --nnodes=1 --nproc-per-node=2 ")
    assert plan.startswith("1 node, 2 processes with 3 threads each; up to 3 restarts")
    starts = sorted(launches.starts(), key=lambda start: start["rank"])
    assert [(start["rank"], start["size"], start["restarts"]) for start in starts] == [
        (0, 2, 0), (1, 2, 0)
    ]  # fmt: skip
    for start in starts:
        assert start["argv"][:3] == ["--epochs", "3", "--distributed"]
        assert start["argv"][3] == "--output"
        assert start["argv"][4].startswith("runs/entry_for_launch-none-")
        assert start["MASTER_ADDR"] == "127.0.0.1" and start["OMP_NUM_THREADS"] == "3"
        assert start["GLOO_SOCKET_IFNAME"] == start["NCCL_SOCKET_IFNAME"] == "lo"
        # No C++ stack traces of connections that end because the other side has ended.
        assert start["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    assert launches.nothing_left()


TORN_DOWN = """
import atexit, sys
from utils.entry import end_process

class Last:
    def __del__(self, print=print):
        print("Python takes itself apart")

last = Last()
atexit.register(print, "at exit")
end_process(3)
"""


@pytest.mark.parametrize("rank", [None, "1"], ids=["alone", "of several"])
def test_a_worker_ends_before_python_finalizes(rank):
    """Threads of its process group could abort it then."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    ended = subprocess.run(
        [sys.executable, "-c", TORN_DOWN], capture_output=True, text=True, cwd=ROOT,
        env=environ | dict.fromkeys(names if rank else (), rank),
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (3, "")
    after = [] if rank else ["Python takes itself apart"]
    assert ended.stdout.splitlines() == ["at exit", *after]


@pytest.mark.parametrize(
    ("arguments", "environ", "line"),
    [
        ((ENTRY, "--epoch", "x"), {}, "error: --epoch: 'x' is not a whole number"),
        ((ENTRY, "--momentun", "1"), {}, "error: unknown flag --momentun, did you mean --mo"),
        (("--widht", "3"), {}, "error: unknown flag --widht, did you mean --width?"),
        (
            ("--tokenizer", "bert"),
            {},
            "error: unknown flag --tokenizer: it belongs to transformer_test.py",
        ),
        (("nothing_test.py",), {}, "error: nothing_test.py: there is no such script here or in "),
        ((ENTRY,), {"NPROC": "many"}, "error: NPROC=many: a whole number of 1 or more"),
        ((ENTRY,), {"NNODES": "2"}, "error: NNODES=2 needs RDZV_ENDPOINT=host:port"),
        ((ENTRY,), {"NNODES": "2", "RDZV_ENDPOINT": "a:1"}, "error: several nodes need --output"),
        (
            (ENTRY, "--no_distributed"),
            {},
            "error: --no_distributed: run_distributed.sh trains one ",
        ),
        ((ENTRY, "--output", "old"), {}, "error: --output old already holds a run"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_started(
    tmp_path, monkeypatch, capsys, arguments, environ, line
):
    monkeypatch.chdir(tmp_path)
    for name, value in (environ | {"NPROC": environ.get("NPROC", "2")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr(launcher, "launch", None)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("")
    with handlers_put_back():
        code = launcher.main([*map(str, arguments)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith(line) and err.count("\n") == 1


def test_the_script_passes_a_mistake_on(launches):
    code, out, err = launches.run(ENTRY, "--momentun", "1")
    assert (code, out) == (2, "")
    assert err.startswith("error: unknown flag --momentun") and err.count("\n") == 1
    assert launches.starts() == []


def test_help_answers_without_python(launches):
    code, out, err = launches.run("--help", PYTHON="/nowhere")
    assert (code, err) == (0, "") and "RDZV_ENDPOINT" in out


def test_the_help_of_an_entry_is_printed(launches):
    code, out, _ = launches.run(ENTRY, "--help", "all")
    assert code == 0 and "usage: entry_for_launch.py" in out and "--do NAME" in out


@pytest.mark.slow
def test_a_users_mistake_in_a_worker_is_reported_once_and_not_retried(launches):
    code, _, err = launches.run(ENTRY, "--do", "mistake", MAX_RESTARTS="1")
    assert (code, err) == (2, "error: the data is wrong\n")
    assert {start["code"] for start in launches.starts() if start["restarts"]} <= {2}
    assert launches.nothing_left()


@pytest.mark.slow
def test_a_rank_that_fails_is_named(launches):
    code, _, err = launches.run(ENTRY, "--do", "fail", "--output", "my run", MAX_RESTARTS="0")
    assert code == 7
    own, line = err.splitlines()
    assert own == "what went wrong"
    assert line.startswith("error: rank 1 on ") and "ended with exit code 7" in line
    assert line.endswith("entry_for_launch.py --resume 'my run'")
    assert launches.nothing_left()


@pytest.mark.slow
def test_after_a_kill_all_are_restarted_until_the_restarts_are_used_up(launches):
    code, _, err = launches.run(ENTRY, "--do", "kill", MAX_RESTARTS="1")
    assert code == 128 + 9
    again, line = err.splitlines()
    assert "was killed by SIGKILL; all are started again (1 of 1 times)" in again
    assert line.startswith("error: rank 1 on ") and "was killed by SIGKILL" in line
    assert {start["restarts"] for start in launches.starts()} == {0, 1}
    assert len({start["argv"][-1] for start in launches.starts()}) == 1  # the same folder
    assert launches.nothing_left()


@pytest.mark.slow
def test_a_failure_that_does_not_recur_is_survived(launches):
    code, _, err = launches.run(ENTRY, "--do", "fail_once")
    assert code == 0 and err.count("\n") == 1
    assert launches.nothing_left()


# SIGTERM: test_nohup_protects_the_workers.
@pytest.mark.slow
@pytest.mark.parametrize(
    "signum", (signal.SIGHUP, pytest.param(signal.SIGINT, marks=pytest.mark.slow))
)
def test_a_signal_to_the_launcher_reaches_the_workers(launches, signum, hangup_ends):
    launch = launches.start(ENTRY, "--do", "train")
    wait_until(lambda: len(launches.starts()) == 2)
    launch.send_signal(signum)
    _, err = launch.communicate(timeout=PATIENCE)
    assert (launch.returncode, err) == (128 + signum, "")
    saved = (launches.folder / "notes" / "saved").read_text().split()
    assert sorted(saved) == ["0", "1"]
    assert launches.nothing_left()


# As torchrun's @prof does when the signal comes before its first line.
MET = """
import signal, sys
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from utils.launch.agent import run_agent

def run(arguments):
    try:
        raise SignalException("", signal.SIGTERM)
        start = 0
    finally:
        start + 1

torchrun.run = run
sys.exit(run_agent(["x_test.py"], 0, None, ""))
"""


@pytest.mark.slow
def test_a_signal_counts_even_if_torchrun_fails_because_of_it():
    ended = subprocess.run([sys.executable, "-c", MET], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (143, "")


@pytest.mark.slow
def test_workers_do_not_outlive_a_launcher_that_is_killed(launches):
    launch = launches.start(ENTRY, "--do", "stubborn")
    wait_until(lambda: len(launches.starts()) == 2)
    launch.kill()
    pids = [start["pid"] for start in launches.starts()]
    wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.slow
def test_nohup_protects_the_workers(launches):
    """torchrun would catch the signal although it is ignored, and end them."""
    launch = launches.start(ENTRY, "--do", "train", before=["nohup"])
    wait_until(lambda: len(launches.starts()) == 2)
    launch.send_signal(signal.SIGHUP)
    for start in launches.starts():
        os.kill(start["pid"], signal.SIGHUP)
    time.sleep(0.5)
    assert launch.poll() is None and len(launches.starts()) == 2
    launch.send_signal(signal.SIGTERM)
    _, err = launch.communicate(timeout=PATIENCE)
    assert launch.returncode == 143
    assert all(line.startswith("nohup: ") for line in err.splitlines()), err
    saved = (launches.folder / "notes" / "saved").read_text().split()
    assert sorted(saved) == ["0", "1"]
    assert launches.nothing_left()


@pytest.mark.slow
def test_a_stubborn_worker_is_killed_in_the_end(launches):
    launch = launches.start(ENTRY, "--do", "stubborn")
    wait_until(lambda: len(launches.starts()) == 2)
    launch.send_signal(signal.SIGTERM)
    start = time.monotonic()
    assert launch.wait(timeout=PATIENCE) == 143
    assert time.monotonic() - start >= 30
    assert launches.nothing_left()


def test_a_job_that_slurm_requeues_on_one_node_resumes_its_run(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("")
    job = Job(ENTRY, [], str(tmp_path), folder_is_given=True, resumed=False, device="cpu")
    monkeypatch.setattr(launcher, "check", lambda script, flags: job)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1"}
    for first in (slurm, slurm | {"SLURM_RESTART_COUNT": "0"}):
        with pytest.raises(UserError, match="already holds a run"):
            launcher.prepare([str(ENTRY)], first)
    again, plan, _ = launcher.prepare([str(ENTRY)], slurm | {"SLURM_RESTART_COUNT": "1"})
    assert again is job and plan.max_nodes == 1


def test_a_folder_that_a_recipe_names_gets_a_number_and_a_typed_one_is_refused(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"output: {tmp_path}/run\n")
    argv = [str(ROOT / "resnet50_test.py"), "--config", str(recipe)]
    job, _, _ = launcher.prepare(argv, {"NPROC": "2"})
    assert job.folder == f"{tmp_path}/run-2" and job.flags[-2:] == ["--output", job.folder]
    assert f"{tmp_path}/run already holds a run" in capsys.readouterr().out
    with pytest.raises(UserError, match="already holds a run: resume it"):
        launcher.prepare([*argv, "--output", f"{tmp_path}/run"], {"NPROC": "2"})
    job, _, _ = launcher.prepare(argv, {"NPROC": "2", "SLURM_RESTART_COUNT": "1"})
    assert job.folder == f"{tmp_path}/run"  # the requeued job goes on with it


@pytest.mark.parametrize(
    ("gpus", "said"),
    [(4, "run_distributed.sh transformer_test.py --ngd"), (0, "That was the demo")],
)
def test_the_launch_without_flags_says_what_comes_next(monkeypatch, capsys, gpus, said):
    plan, job = Plan(max(gpus, 2), 1), Job(ENTRY, [], None, False, False, "auto")
    monkeypatch.setattr(launcher, "prepare", lambda argv, environ: (job, plan, gpus == 0))
    monkeypatch.setattr(launcher, "launch", lambda job, plan, argv: 0)
    monkeypatch.delenv("HOSTFILE", raising=False)
    with handlers_put_back():
        assert launcher.main([]) == 0
        assert said in capsys.readouterr().out
        launcher.main(["resnet50_test.py"])
    assert capsys.readouterr().out == ""


def test_a_taken_port_is_told_by_the_node_of_the_rendezvous_before_the_launch(monkeypatch):
    job = Job(ENTRY, [], "run", folder_is_given=True, resumed=False, device="cpu")
    monkeypatch.setattr(launcher, "check", lambda script, flags: job)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        nodes = {"NNODES": "2", "RDZV_ENDPOINT": endpoint}
        with pytest.raises(UserError, match="is taken: set another RDZV_ENDPOINT"):
            launcher.prepare([str(ENTRY)], nodes | {"NODE_RANK": "0"})
        _, plan, _ = launcher.prepare([str(ENTRY)], nodes | {"NODE_RANK": "1"})
        assert plan.endpoint == endpoint


@pytest.mark.parametrize(
    "flags", [("--output_dir=a=b",), ("--config", "recipe.yaml"), ("--resume", "old", "-o", "a=b")]
)
def test_a_worker_that_is_started_again_resumes_however_the_folder_was_named(
    tmp_path, monkeypatch, flags
):
    run = tmp_path / "a=b"
    monkeypatch.setenv("LAUNCH_RUN", str(run))
    place = LaunchedAs(0, 2, 0, 2, 1)
    first = [*flags, "--distributed"]
    assert entry._as_launched(list(flags), place) == first
    run.mkdir()
    (run / "config.yaml").write_text("")
    assert entry._as_launched(list(flags), place) == [*first, "--resume", str(run)]
