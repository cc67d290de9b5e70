"""Two network namespaces with a cable between them, which can be slow; Linux, and root's rights."""

import ctypes
import json
import os
import subprocess

CABLE = "cable"  # the network device in both
ADDRESSES = "10.77.0.1", "10.77.0.2"
CLONE_NEWNET = 0x40000000  # of setns(2)


class TwoNetworks:
    """A context in which the namespaces exist.

    Args:
        bits_per_second: what each end sends at most; None: the cable is as fast as loopback.

    Raises:
        OSError: on entering, with the reason: namespaces, or their tools, are not permitted here.
    """

    def __init__(self, bits_per_second: float | None = None):
        self.names = [f"cable-{os.getpid()}-{node}" for node in "ab"]
        self.bits_per_second = bits_per_second

    def __enter__(self) -> "TwoNetworks":
        a, b = self.names
        try:
            for name in self.names:
                _call("ip", "netns", "add", name)
            ends = ["type", "veth", "peer", "name", CABLE, "netns", b]
            _call("ip", "-n", a, "link", "add", CABLE, *ends)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
                for device in ("lo", CABLE):
                    _call("ip", "-n", name, "link", "set", device, "up")
                if self.bits_per_second is not None:
                    self._slow_down(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _slow_down(self, name: str) -> None:
        # A bucket of 10 ms: small against what is measured, but not below a packet.
        burst = max(20_000, round(self.bits_per_second / 8 * 0.01))
        limits = [
            "rate",
            f"{self.bits_per_second:.0f}bit",
            "burst",
            f"{burst}b",
            "latency",
            "400ms",
        ]
        _call("tc", "-n", name, "qdisc", "add", "dev", CABLE, "root", "tbf", *limits)

    def __exit__(self, *_) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def inside(self, node: int) -> list[str]:
        """Words that make a command run in a namespace: 0 or 1."""
        return ["ip", "netns", "exec", self.names[node]]

    def cut(self) -> None:
        _call("ip", "-n", self.names[0], "link", "set", CABLE, "down")

    def sent_bytes(self) -> int:
        """What the first namespace has sent so far."""
        [link] = json.loads(_call("ip", "-n", self.names[0], "-s", "-j", "link", "show", CABLE))
        return link["stats64"]["tx"]["bytes"]


def enter(names: list[str], node: int) -> None:
    """Moves this thread, and those that it starts, into the namespace of `names[node]`; gloo then
    takes the cable."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{names[node]}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = CABLE


def _call(*words: str) -> str:
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(words)}: {error.stderr.strip()}") from None
