"""Without --cuda_graphs, graphs are used where steps are launch-bound. A run is the ordinary one,
to the bit, whatever is chosen; the recorder is a fake one."""

import pytest
from stand_in_recorder import StandIn, graphed
from toy import assert_same, everything, make_trainer, use_graphs

from utils.data.images.loader import Packed
from utils.engines.graphed_step import WARM_UP
from utils.engines.launch_bound import TIMED
from utils.runs.dry_run import time_steps


def test_graphs_are_chosen_where_steps_are_launch_bound(tmp_path, capsys):
    """The first step and TIMED more are ordinary, as is the smaller last one of every 6. From the
    second epoch on the augmentation is in the graph; only then WARM_UP begins."""
    plain = make_trainer(tmp_path / "plain", optimizer="adamw", ema_decay=0.9, epochs=4)
    plain.fit()
    capsys.readouterr()
    ours, recorder = graphed(
        tmp_path / "ours", asked=False, optimizer="adamw", ema_decay=0.9, epochs=4, log_every=1
    )
    replays, augments = [], []
    capture, made = recorder.capture, ours.loader.made

    def watched(function):
        replay = capture(function)

        def noted():
            replays.append(ours.progress.step)
            replay()

        return noted

    def watched_made(batch):
        if isinstance(batch.inputs, Packed) and ours.progress.step in replays:
            augments.append(ours.progress.step)
        return made(batch)

    recorder.capture, ours.loader.made = watched, watched_made
    ours.fit()
    said = capsys.readouterr().out
    assert TIMED == WARM_UP == 3 and recorder.captured == 1
    assert replays == augments == [9, 10, 12, 13, 14, 15, 16, 18, 19, 20, 21, 22]
    assert said.count("CUDA graphs: used, because launching a step takes ") == 1
    assert said.count("--no_cuda_graphs turns them off") == 1 and "not used" not in said
    assert_same(everything(ours), everything(plain))


def test_graphs_are_not_chosen_where_the_device_is_slower(tmp_path, capsys):
    plain = make_trainer(tmp_path / "plain", epochs=2)
    plain.fit()
    capsys.readouterr()
    ours, recorder = graphed(tmp_path / "ours", asked=False, step_ms=1e9, epochs=2)
    logged = []
    ours.log.console.log = logged.append
    ours.fit()
    assert "graphs" not in capsys.readouterr().out
    assert sum("CUDA graphs: not used, because launching" in line for line in logged) == 1
    assert recorder.captured == recorder.warm == 0
    assert_same(everything(ours), everything(plain))


@pytest.mark.parametrize("trouble", [{"failure": "no luck"}, {"waits": ("guard.py:57",)}])
def test_a_failure_is_only_logged_if_graphs_were_not_asked_for(tmp_path, capsys, trouble):
    ours = make_trainer(tmp_path)
    use_graphs(ours, StandIn(**trouble), asked=False)
    logged = []
    ours.log.console.log = logged.append
    ours.fit()
    assert "not used" not in capsys.readouterr().out
    (line,) = [line for line in logged if "CUDA graphs: not used" in line]
    assert next(iter(trouble.values()))[0] in line
    assert not ours.steps.holds_memory


def test_a_dry_run_does_not_time_the_steps_before_the_choice(tmp_path):
    ours, recorder = graphed(tmp_path, asked=False, epochs=8)
    warm_up = time_steps(ours).warm_up_steps
    assert recorder.captured and warm_up >= 1 + TIMED + WARM_UP + 1
