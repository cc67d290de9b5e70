"""The network of this machine: at which address others reach it, and by which interface."""

import errno
import fcntl
import os
import socket
import struct

from ..errors import UserError

LOOPBACK = "127.0.0.1"
# Nothing is sent there: the kernel's route to an address outside shows which interface leads out.
# This one is for documentation only (RFC 5737).
OUTSIDE = "198.51.100.1"
SIOCGIFADDR = 0x8915  # <linux/sockios.h>: the address of an interface


def local_address(host: str, port: int) -> str:
    """The address at which the node of the rendezvous, and so every node, reaches this one. On that
    node itself, whose name may resolve to loopback: `host`."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing: the kernel looks up the route
            address = probe.getsockname()[0]
    except OSError:
        return socket.gethostname()
    return host if address.startswith("127.") else address


def refuse_taken_port(port: int) -> None:
    """Raises UserError if no rendezvous can listen on this port of the machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As PyTorch does: connections of an earlier launch that linger there do no harm. Nothing
        # listens here, so a node that is early gets no answer and tries again.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            why = {errno.EADDRINUSE: "is taken", errno.EACCES: "is for root only"}
            if error.errno in why:
                raise UserError(
                    f"port {port} of this node {why[error.errno]}: set another RDZV_ENDPOINT"
                ) from None


def choose_interface(address: str) -> None:
    """Makes gloo use the interface with this address of the machine, unless the user has chosen
    one; on loopback NCCL, too, which elsewhere chooses well.

    Args:
        address: as `local_address` returns it. Where no interface has it, and the machine's own
            name leads to loopback, gloo gets the interface that leads out.
    """
    if is_loopback(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        return
    interface = interface_of(address)
    if interface is None and is_loopback(_own_address()):
        interface = interface_of(local_address(OUTSIDE, 1))
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "localhost"


def interface_of(address: str) -> str | None:
    """Name of the network interface with this IPv4 address. By default gloo takes the one that the
    machine's own name resolves to, often loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # this interface has no IPv4 address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


def _own_address() -> str:
    """The IPv4 address of the machine's own name, which gloo takes by default; where there is none,
    gloo takes loopback."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return LOOPBACK
