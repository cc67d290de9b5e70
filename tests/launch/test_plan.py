"""The environment as a plan, and the launch folder of the workers."""

import subprocess

import pytest
from patience import PATIENCE

from utils.errors import UserError
from utils.launch import agent, environment
from utils.launch import plan as launch_plan
from utils.launch.plan import Plan, first_node, read_plan

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-09,12],login1",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_CPUS_PER_TASK": "32",
}
NODES = {"NNODES": "2", "RDZV_ENDPOINT": "node1:29400"}


def plan(environ, gpus=0, cores=8, without_gpu=1):
    return read_plan(environ, lambda: gpus, cores, without_gpu)


def test_the_plan_of_one_node():
    assert plan({}) == Plan(1, 8)
    assert plan({}, gpus=4) == Plan(4, 2)
    assert plan({}, gpus=16) == Plan(16, 1)
    assert plan({}, without_gpu=2) == Plan(2, 4)
    assert plan({"NPROC": "3", "OMP_NUM_THREADS": "5", "MAX_RESTARTS": "0"}) == Plan(
        3, 5, restarts=0
    )
    assert plan({"NPROC": "", "NNODES": " "}) == Plan(1, 8)
    assert plan({"NNODES": "1", "RDZV_ENDPOINT": "somewhere"}) == Plan(1, 8)


def test_a_plan_in_words():
    several = plan(NODES | {"NPROC": "2", "MAX_RESTARTS": "0"})
    assert [str(each) for each in (Plan(1, 8), Plan(2, 1, restarts=1), several)] == [
        "1 node, 1 process with 8 threads; up to 3 restarts",
        "1 node, 2 processes with 1 thread each; up to 1 restart",
        "2 nodes, on this one 2 processes with 4 threads each; no restarts; "
        "rendezvous: node1:29400",
    ]


def test_gpus_are_counted_only_if_their_number_is_not_given():
    read_plan({"NPROC": "2"}, lambda: pytest.fail("counted"), 8)


def test_the_plan_of_several_nodes():
    assert plan(NODES) == Plan(1, 8, 2, 2, 3, "training", "node1:29400")
    ranks = [plan(NODES | {"NODE_RANK": str(rank)}).is_host for rank in (0, 1)]
    assert ranks == [True, False]
    elastic = plan(NODES | {"NNODES": "1:4", "RDZV_ID": "a", "JOIN_TIMEOUT": "30"})
    assert (elastic.min_nodes, elastic.max_nodes, elastic.nodes) == (1, 4, "1:4")
    assert (elastic.run_id, elastic.join) == ("a", 30)
    address = plan(NODES | {"RDZV_ENDPOINT": "[fe80::1]:29400"})
    assert (address.host, address.port) == ("fe80::1", 29400)


def test_variables_of_slurm():
    found = plan(SLURM)
    assert found == Plan(
        4, 8, 2, 2, 3, "slurm-4711-2", f"gpu07:{20000 + 4711 + 202}", is_host=False
    )
    assert plan(SLURM | {"SLURM_NODEID": "0"}).is_host
    assert plan(SLURM | {"SLURM_JOB_ID": "99999999"}).port < 32768
    assert plan(SLURM | {"NPROC": "1", "NNODES": "1:2"}).min_nodes == 1
    assert plan(SLURM | {"SLURM_STEP_NODELIST": "cpu1"}).host == "cpu1"
    alone = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "4"}
    assert plan(alone) == Plan(1, 4)


def test_in_the_shell_of_an_allocation_the_users_nodes_count():
    """Which is in no step of srun."""
    shell = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert plan(shell | {"NNODES": "1"}) == Plan(4, 8)
    assert plan(SLURM | {"NNODES": "1", "SLURM_STEP_NUM_TASKS": "8"}) == Plan(4, 8)
    by_ssh = plan(shell | NODES | {"NODE_RANK": "1"})
    assert (by_ssh.endpoint, by_ssh.is_host) == ("node1:29400", False)
    own_tasks = NODES | {"SLURM_STEP_NUM_TASKS": "8", "NNODES": "8", "NODE_RANK": "5"}
    assert plan(SLURM | own_tasks).max_nodes == 8


SHELL = SLURM | {"SLURM_STEP_ID": str(2**32 - 6), "SLURM_STEP_NUM_TASKS": "1"}  # salloc's, a step


@pytest.mark.parametrize(
    "step",
    [
        {},
        {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu07"},
        {"SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "2"},
    ],
)
def test_the_shell_of_salloc_is_on_one_of_the_nodes_even_if_it_is_a_step(step):
    with pytest.raises(UserError, match="has 2 nodes, and this command runs on one of them"):
        plan(SHELL | step)
    assert plan(SHELL | step | {"NNODES": "1"}) == Plan(4, 8)
    assert plan(SHELL | step | NODES | {"NODE_RANK": "1"}).endpoint == "node1:29400"


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[3,5]", "gpu3"),
        ("rack[1-2]node[04-05]", "rack1node04"),
        ("a-b[2-3]-c", "a-b2-c"),
    ],
)
def test_the_first_node_of_slurms_list(names, first):
    assert first_node(names) == first


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"NPROC": "two"}, "NPROC=two: a whole number of 1 or more"),
        ({"NPROC": "0"}, "NPROC=0"),
        ({"NPROC": "-1"}, "NPROC=-1"),
        ({"MAX_RESTARTS": "1.5"}, "MAX_RESTARTS=1.5"),
        ({"OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS=0"),
        ({"NNODES": "4:1"}, "NNODES=4:1"),
        ({"NNODES": "0"}, "NNODES=0"),
        ({"NNODES": "1:2:3"}, "NNODES=1:2:3"),
        ({"NNODES": "2"}, "NNODES=2 needs RDZV_ENDPOINT=host:port"),
        (NODES | {"RDZV_ENDPOINT": "node1"}, "RDZV_ENDPOINT=node1: host:port"),
        (NODES | {"RDZV_ENDPOINT": "node1:99999"}, "RDZV_ENDPOINT=node1:99999"),
        (NODES | {"NODE_RANK": "2"}, "NODE_RANK=2: with 2 nodes it is 1 at most"),
        ({**SLURM, "SLURM_STEP_ID": ""}, "srun --ntasks-per-node=1"),
        (SLURM | {"SLURM_STEP_ID": "", "NNODES": "2"}, "srun --ntasks-per-node=1"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "8"}, "8 tasks on 2 nodes"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, "1 task on 2 nodes"),
        ({**SLURM, "SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is missing"),
    ],
)
def test_mistakes_in_the_environment_are_refused(environ, message):
    with pytest.raises(UserError) as error:
        plan(environ)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_command_line_of_torchrun():
    command = plan(NODES | {"NODE_RANK": "0"}).torchrun("10.0.0.1", "x_test.py", ["--bs", "8"])
    assert command[-3:] == ["x_test.py", "--bs", "8"]
    assert "--nnodes=2" in command and "--rdzv-endpoint=node1:29400" in command
    assert any("is_host=1" in word for word in command)
    alone = plan({"NPROC": "2"}).torchrun("127.0.0.1", "x_test.py", [])
    assert "--rdzv-endpoint=127.0.0.1:0" in alone and "--nproc-per-node=2" in alone


# ---- for the workers --------------------------------------------------------------------------


def test_a_process_alone_is_not_launched(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv(environment.LAUNCH_FOLDER, raising=False)
    assert environment.launched() is None
    assert environment.previous_exit_code() is None
    assert environment.note_exit_code(2)
    environment.die_with_launcher()


def test_the_first_exit_code_counts(monkeypatch, tmp_path):
    monkeypatch.setenv(environment.LAUNCH_FOLDER, str(tmp_path))
    assert environment.previous_exit_code() is None
    assert environment.note_exit_code(2)
    assert not environment.note_exit_code(3)
    assert environment.previous_exit_code() == 2
    monkeypatch.setenv(environment.LAUNCH_FOLDER, str(tmp_path / "gone"))
    assert environment.note_exit_code(2) and environment.previous_exit_code() is None


def test_the_identity_of_a_worker_comes_from_torchrun(monkeypatch):
    values = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for name, value in (values | {"TORCHELASTIC_RESTART_COUNT": 5}).items():
        monkeypatch.setenv(name, str(value))
    assert environment.launched() == environment.LaunchedAs(3, 4, 1, 2, 5)


def test_a_node_that_is_lost_is_noticed_within_a_minute():
    """Whether another node has the rendezvous or this one."""
    assert agent.SILENCE + agent.GRACE + 2 * agent.PROBE < 60
    assert launch_plan.KEEP_ALIVE * launch_plan.MISSED + launch_plan.LAST_CALL < 60


def test_a_worker_is_killed_with_its_process_group():
    """With what it has started; one that has already ended does no harm."""
    script = "sleep 3600 & echo $!; wait"
    workers = [
        subprocess.Popen(
            ["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        for _ in range(2)
    ]
    helpers = [int(worker.stdout.readline()) for worker in workers]
    assert {worker.pid for worker in workers} <= {*agent.children()}
    gone = subprocess.Popen(["true"], start_new_session=True)
    gone.wait()
    agent.kill_groups([gone.pid, *(worker.pid for worker in workers)])
    assert [worker.wait(PATIENCE) for worker in workers] == [-9, -9]
    for worker, helper in zip(workers, helpers, strict=True):
        assert worker.stdout.read() == "", f"{helper} holds the pipe"  # returns when all have ended
        worker.stdout.close()


def test_an_endpoint_stands_in_for_a_missing_list_of_nodes():
    given = plan({**SLURM, "SLURM_JOB_NODELIST": "", "RDZV_ENDPOINT": "node1:29500"})
    assert given.endpoint == "node1:29500" and given.max_nodes == 2
