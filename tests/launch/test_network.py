"""Network interfaces, by fake kernel files."""

from utils.launch.network import infiniband, interface_of, interface_speed


def test_the_speed_of_an_interface(tmp_path):
    for name, speed in (("eth0", "100000"), ("down", "-1"), ("odd", "")):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
        (tmp_path / "sys/class/net" / name / "speed").write_text(f"{speed}\n")
    speeds = [interface_speed(name, tmp_path) for name in ("eth0", "down", "odd", "none")]
    assert speeds == [12.5e9, None, None, None]


def test_the_active_ports_of_infiniband(tmp_path):
    assert infiniband(tmp_path) == {}
    ports = {"mlx5_0": ("4: ACTIVE", "400 Gb/sec (4X NDR)"), "mlx5_1": ("1: DOWN", "10 Gb/sec")}
    for name, (state, rate) in ports.items():
        port = tmp_path / "sys/class/infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate}\n")
    assert infiniband(tmp_path) == {"mlx5_0:1": 50e9}


def test_loopback_is_found_by_its_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None  # for documentation only: nobody has it
