import os
import signal

import pytest
from launch.script_runs import Launches, alive


@pytest.fixture
def launches(tmp_path):
    launches = Launches(tmp_path)
    yield launches
    for launch in launches.started:
        if launch.poll() is None:
            launch.kill()
        launch.communicate()
    for path in tmp_path.glob("notes*"):
        for start in launches.starts(path.name):
            if alive(start["pid"]):
                os.kill(start["pid"], signal.SIGKILL)
