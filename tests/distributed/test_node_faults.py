"""Two launchers as two nodes, which train a real network: one of them is killed, or cut off."""

import contextlib
import subprocess
import time

import pytest
from distributed.faulty import BATCH, IMAGES, SAMPLES, Runs, end, epoch_order, fault
from distributed.world import free_port
from patience import PATIENCE, wait_until

from benchmarks.networks import TwoNetworks

pytestmark = pytest.mark.slow

GLOBAL = 2 * BATCH
STEPS = -(-SAMPLES // GLOBAL)  # of an epoch
FLAGS = [*IMAGES, "--epochs", 3, "--global_batch", GLOBAL, "--dist_timeout", 0.33,
         "--output", "run"]  # fmt: skip


@pytest.fixture
def runs(tmp_path):
    runs = Runs(tmp_path)
    yield runs
    runs.close()


def start(runs, rank: int, endpoint: str, **options) -> subprocess.Popen:
    """Node `rank` of one or two, with one process."""
    return runs.start(
        *FLAGS, name="run", NNODES="1:2", NODE_RANK=str(rank), NPROC="1", RDZV_ENDPOINT=endpoint,
        JOIN_TIMEOUT=str(PATIENCE), **options,
    )  # fmt: skip


def check_end(runs, since: float) -> None:
    """Asserts that one process went on with the run after the time `since`, without any loss."""
    assert runs.order("run") == [step for n in range(3) for step in epoch_order(n, GLOBAL)]
    summary = runs.summary("run")
    assert summary["global_batch_size"] == GLOBAL and summary["world_size"] == 1
    assert [step for step, _ in runs.losses("run")] == list(range(1, 3 * STEPS + 1))
    again = min(note["time"] for note in runs.notes("run", "step") if note["time"] > since + 1)
    print(f"back at work after {again - since:.1f} s, {runs.check_redone('run')} steps redone")


def test_a_run_goes_on_without_a_node_that_is_killed(runs):
    endpoint = f"127.0.0.1:{free_port()}"
    dies = [fault("forward", 8, do="kill the launcher")]
    first = start(runs, 0, endpoint, faults=dies)
    second = start(runs, 1, endpoint, faults=dies)
    code, err = end(first)
    assert code == 0, err
    assert second.wait() == -9
    check_end(runs, runs.notes("run", "fault")[0]["time"])


# ---- network namespaces -------------------------------------------------------------------------


@pytest.fixture
def networks():
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(TwoNetworks())
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")


def test_a_run_goes_on_without_a_node_that_is_cut_off(runs, networks):
    endpoint = f"10.77.0.1:{free_port()}"
    both = [start(runs, rank, endpoint, prefix=networks.inside(rank), PACE="0.3")
            for rank in range(2)]  # fmt: skip
    wait_until(lambda: any(note["step"] >= 4 for note in runs.notes("run", "step")))
    networks.cut()
    cut = time.time()
    code, err = end(both[1])
    print(f"the node that was cut off ended after {time.time() - cut:.1f} s")
    assert code == 1
    assert "the rendezvous" in err.splitlines()[-1] and "RDZV_ENDPOINT" in err
    code, err = end(both[0])
    assert code == 0, err
    check_end(runs, cut)
