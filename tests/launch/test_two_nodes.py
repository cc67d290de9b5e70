"""Two agents on this machine as two nodes: they meet, stop and fail together."""

import os
import signal
import subprocess

import pytest
from distributed.world import free_port
from launch.script_runs import ENTRY, Launches
from patience import PATIENCE, wait_until


class Nodes:
    """Agents that share a rendezvous on loopback; node 0 holds it."""

    def __init__(self, launches: Launches, nnodes: str):
        self.launches, self.nnodes, self.endpoint = launches, nnodes, f"127.0.0.1:{free_port()}"

    def start(self, rank: int, name: str, do: str = "meet", **environ) -> subprocess.Popen:
        """Starts node `rank` with one process, whose notes are in the folder notes-`name`."""
        environ = {"NODE_RANK": str(rank), "NPROC": "1", "JOIN_TIMEOUT": str(PATIENCE)} | environ
        return self.launches.start(
            *(ENTRY, "--do", do, "--output", "run"),
            notes=f"notes-{name}",
            NNODES=self.nnodes,
            RDZV_ENDPOINT=self.endpoint,
            **environ,
        )

    def met(self, name: str) -> list[str]:
        """ "sum of ranks + 1, size" for each time that the workers of a node met the others."""
        path = self.launches.folder / f"notes-{name}" / "met"
        return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_two_nodes_train_together_and_stop_together(launches):
    nodes = Nodes(launches, "2")
    both = [nodes.start(0, "a"), nodes.start(1, "b")]
    wait_until(lambda: nodes.met("a") == nodes.met("b") == ["3 2"])
    for node in both:
        node.send_signal(signal.SIGTERM)
    for node in both:
        assert (node.communicate(timeout=PATIENCE)[1], node.returncode) == ("", 143)
    assert launches.nothing_left()


@pytest.mark.slow
def test_a_failure_on_one_of_two_nodes_restarts_both(launches):
    nodes = Nodes(launches, "2")
    both = [nodes.start(0, "a"), nodes.start(1, "b")]
    wait_until(lambda: nodes.met("a") == nodes.met("b") == ["3 2"])
    os.kill(launches.starts("notes-b")[0]["pid"], signal.SIGKILL)
    wait_until(lambda: nodes.met("a") == nodes.met("b") == ["3 2", "3 2"])
    for node in both:
        node.send_signal(signal.SIGTERM)
    assert [node.wait(timeout=PATIENCE) for node in both] == [143, 143]
    assert launches.nothing_left()


@pytest.mark.slow
def test_without_the_node_of_the_rendezvous_every_agent_ends(launches):
    nodes = Nodes(launches, "1:2")
    first, second = nodes.start(0, "a"), nodes.start(1, "b", do="meet")
    wait_until(lambda: nodes.met("a") == nodes.met("b") == ["3 2"])
    first.kill()
    _, err = second.communicate(timeout=PATIENCE)
    assert second.returncode == 1
    assert err.splitlines()[-1].startswith("error: the rendezvous does not answer")
    assert f"RDZV_ENDPOINT={nodes.endpoint}" in err and "--output run" in err


@pytest.mark.slow
def test_an_elastic_run_goes_on_alone_and_takes_the_node_back(launches):
    nodes = Nodes(launches, "1:2")
    first, second = nodes.start(0, "a"), nodes.start(1, "b")
    wait_until(lambda: nodes.met("a") == nodes.met("b") == ["3 2"])
    second.kill()
    os.kill(launches.starts("notes-a")[0]["pid"], signal.SIGKILL)  # as a failed collective would
    wait_until(lambda: nodes.met("a")[1:] == ["1 1"], "it does not go on alone")
    back = nodes.start(1, "c")
    wait_until(lambda: nodes.met("a")[2:] == nodes.met("c") == ["3 2"], "it has not come back")
    for node in (first, back):
        node.send_signal(signal.SIGTERM)
    assert [node.wait(timeout=PATIENCE) for node in (first, back)] == [143, 143]
