"""What the links between the ranks should give."""

from dataclasses import dataclass

# The longest that a small collective should take, in seconds: assumed, with some room.
LATENCY = {"one host": 200e-6, "InfiniBand": 500e-6, "Ethernet": 2e-3}
ENOUGH = 0.5  # of the link's bandwidth; a collective below it fails the check


@dataclass(frozen=True)
class Expected:
    """
    Attributes:
        bandwidth: bytes per second of the narrowest link in one direction; None: unknown.
        latency: seconds that a small collective takes at most; None: unknown.
        why: on which assumptions.
    """

    bandwidth: float | None
    latency: float | None
    why: str


def expected(ranks: list[dict]) -> Expected:
    """What collectives over all ranks should reach: the bandwidth of the narrowest link, by the
    `facts_of` each rank."""
    if any(rank["device"]["type"] != "cuda" for rank in ranks):
        return Expected(None, None, "links between processes on CPUs are not judged")
    inside, between = [], []
    hosts: dict[str, list[dict]] = {}
    for rank in ranks:
        hosts.setdefault(rank["host"], []).append(rank)
    for members in hosts.values():
        if len(members) > 1:
            inside += [_inside(rank["device"], len(members) - 1) for rank in members]
        between.append(_between(members[0]))
    known = [*inside, *(between if len(hosts) > 1 else [])]
    unknown = next((why for bandwidth, why in known if bandwidth is None), None)
    if unknown:
        return Expected(None, None, f"the links are not judged: {unknown}")
    bandwidth, why = min(known)
    kind = "one host"
    if len(hosts) > 1:
        kind = "InfiniBand" if all("InfiniBand" in why for _, why in between) else "Ethernet"
    return Expected(bandwidth, LATENCY[kind], f"assumed: {why}, the narrowest link")


def _inside(device: dict, others: int) -> tuple[float | None, str]:
    """(bytes per second, why) from a GPU to the `others` of its host."""
    links = device["links"]
    if links is None:
        return None, "the links of the GPUs are unknown without NVML (pip install nvidia-ml-py)"
    if links["nvlink"] and (links["gpus"] is None or links["gpus"] >= others):
        return links["nvlink"], "all NVLinks of a GPU in one direction"
    if not links["pcie"]:
        return None, "the GPUs do not tell their links"
    if device["peers"] is False:
        return links["pcie"] / 2, "half of a GPU's PCI Express, by way of the host's memory"
    return links["pcie"], "PCI Express of a GPU in one direction"


def _between(rank: dict) -> tuple[float | None, str]:
    """(bytes per second, why) from a host to the others."""
    network = rank["network"]
    if network["infiniband"] and rank["environment"].get("NCCL_IB_DISABLE", "0") != "1":
        ports = network["infiniband"]
        return sum(ports.values()), f"all {len(ports)} active InfiniBand or RoCE ports of a host"
    speed = network["bytes_per_second"]
    if speed:
        return speed, f"Ethernet by {network['interface']}"
    return None, f"the system does not tell the speed of {network['interface']}"
