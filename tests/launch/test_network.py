"""Network interfaces, by fake kernel files, the choice among them, and taken ports."""

import os
import socket

import pytest

from utils.errors import UserError
from utils.launch import network
from utils.launch.environment import set_environment
from utils.launch.launchers import LaunchedAs
from utils.launch.network import (
    choose_interface,
    interface_of,
    local_address,
    refuse_taken_port,
)


def test_loopback_is_found_by_its_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None  # for documentation only: nobody has it


# ---- the choice of gloo's interface -------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """A machine whose own name is loopback to itself, as Debian sets it up, with an interface that
    leads out."""
    look_up = socket.getaddrinfo

    def names(host, *arguments, **named):
        return look_up({"node1": "127.0.1.1"}.get(host, host), *arguments, **named)

    monkeypatch.setattr(network.socket, "getaddrinfo", names)
    monkeypatch.setattr(network, "OUTSIDE", "127.0.0.7")  # which `local_address` returns
    monkeypatch.setattr(network, "interface_of", {"127.0.0.7": "eth5", "10.1.0.7": "ib0"}.get)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return monkeypatch


def test_gloo_does_not_follow_a_machines_own_name_to_loopback(machine):
    """Other nodes could not reach it there."""
    assert local_address("node1", 29400) == "node1"
    choose_interface("node1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth5"
    assert "NCCL_SOCKET_IFNAME" not in os.environ  # NCCL never takes loopback by itself


@pytest.mark.parametrize(
    ("address", "chosen"), [("10.1.0.7", "ib0"), ("127.0.0.1", "lo"), ("localhost", "lo")]
)
def test_gloo_takes_the_interface_with_the_address(machine, address, chosen):
    choose_interface(address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == chosen


def test_the_choice_of_the_user_stays(machine):
    machine.setenv("GLOO_SOCKET_IFNAME", "eth9")
    choose_interface("node1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth9"


@pytest.mark.parametrize(
    ("address", "local_size", "chosen"),
    [("node1", 2, "eth5"), ("node1", 4, None), ("localhost", 2, None)],
)
def test_plain_torchrun_gets_an_interface_on_several_machines_only(
    machine, address, local_size, chosen
):
    machine.setenv("MASTER_ADDR", address)
    set_environment(LaunchedAs(1, 4, 1, local_size))
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen


def test_loopback_does_not_lead_out():
    assert interface_of(local_address(network.OUTSIDE, 1)) != "lo"


# ---- ports --------------------------------------------------------------------------------------


def test_a_taken_port_is_refused_and_a_lingering_connection_is_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of this node is taken: set another RDZV"):
            refuse_taken_port(port)
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()  # ends first, and so lingers in TIME_WAIT
            assert client.recv(1) == b""
    refuse_taken_port(port)
