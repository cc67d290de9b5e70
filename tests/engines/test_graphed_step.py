"""Steps by graphs, with a fake recorder: a replay calls the captured function again, with the same
tensors. The run is the ordinary one, to the bit."""

import itertools

import pytest
import torch
from stand_in_recorder import StandIn, graphed
from toy import assert_same, everything, history, loader, make_trainer, use_graphs

from utils.data.images.loader import Packed
from utils.engines.graphed_step import WARM_UP
from utils.mixup.mixing import Mixing
from utils.optim.schedules import Schedule
from utils.runs.dry_run import time_steps
from utils.training.class_balance import ClassBalance


def mixing(**options):
    return Mixing(alpha=0.5, block=4, height=8, width=8, **options)


CASES = {
    "sgd": {},
    "adamw, average, clipping, bf16": {
        "optimizer": "adamw", "ema_decay": 0.9, "clip": 0.5, "precision": "bf16",
    },
    "no momentum, warm-up": {
        "optimizer_options": {}, "schedule": lambda: Schedule("linear", 18, 6), "ema_decay": 0.5,
    },
    "lamb, average": {"optimizer": "lamb", "lr": 0.01, "ema_decay": 0.9},
    "muon": {"optimizer": "muon", "lr": 0.01},
    "madgrad": {"optimizer": "madgrad", "lr": 0.01},
    "ngd, which now and then updates its matrices": {"optimizer": "ngd", "lr": 0.01, "epochs": 5},
    "mixup": {"mixing": mixing, "ema_decay": 0.9},
    "mixup for each sample, looked at unmixed": {
        "mixing": lambda: mixing(per_sample=True, different_classes=True), "clean_accuracy": True,
    },
    "class weights, mixup, clipping": {
        "balance": ClassBalance(0.1, torch.tensor([0.5, 2.0, 0.1])), "mixing": mixing, "clip": 0.5,
    },
    "mixup and CutMix by turns": {"mixing": lambda: mixing(cutmix_alpha=1.0), "epochs": 6},
    "mixed now and then, later never": {
        "mixing": lambda: mixing(probability=0.5, off_epoch=3), "epochs": 6,
    },
}  # fmt: skip


def made(options: dict) -> dict:
    """The options with a new Mixing, which belongs to one loader."""
    return options | ({"mixing": options["mixing"]()} if "mixing" in options else {})


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_ordinary_one(tmp_path, case):
    """Six steps in an epoch, the last one of 3 samples in place of 4."""
    plain = make_trainer(tmp_path / "plain", **made(CASES[case]))
    plain.fit()
    ours, recorder = graphed(tmp_path / "ours", **made(CASES[case]))
    ours.fit()
    assert recorder.captured and recorder.replayed > recorder.captured
    short = ours.plan.total_steps // 6
    assert recorder.replayed + recorder.warm // 2 == ours.plan.total_steps - short
    assert_same(everything(ours), everything(plain))
    assert history(tmp_path / "ours") == history(tmp_path / "plain")


def test_steps_from_which_meta_mixup_learns_are_ordinary(tmp_path):
    """Every third one; the graphs of the others read the policy that these have changed."""
    options = {"optimizer": "ngd", "lr": 0.01, "epochs": 6}

    def learning():
        return mixing(meta_form="policy", clean_samples=2, update_every=3)

    plain = make_trainer(tmp_path / "plain", mixing=learning(), **options)
    plain.fit()
    ours, recorder = graphed(tmp_path / "ours", mixing=learning(), **options)
    ours.fit()
    # Of each six steps two have clean samples, and the last one is smaller.
    assert recorder.captured == 2 and recorder.replayed == 6 * 3 - 2 * WARM_UP
    assert_same(everything(ours), everything(plain))
    assert history(tmp_path / "ours") == history(tmp_path / "plain")


def test_augmentation_is_in_the_graph(tmp_path):
    """Batches have packed choices, from which the graph makes pictures at every replay."""
    ours, recorder = graphed(tmp_path, epochs=2)
    made, given = ours.loader.made, []

    def watched(batch):
        given.append(batch.inputs)
        return made(batch)

    ours.loader.made = watched
    ours.fit()
    assert recorder.replayed and len(given) == ours.plan.total_steps
    assert all(isinstance(inputs, Packed) for inputs in given)
    assert {inputs.choices.dtype for inputs in given} == {torch.int64}


def places(trainer) -> dict:
    """The addresses of the tensors that a step reads and writes."""
    guard, tensors = trainer.steps.guard, {}
    tensors |= {f"weight {name}": t for name, t in trainer.steps.model.state_dict().items()}
    tensors |= {f"average {name}": t for name, t in trainer.steps.average.mean.items()}
    tensors |= {
        "window": trainer.steps.window,
        "sums": trainer.steps.step_sums,
        "left out": guard.left_out,
    }
    tensors |= {f"buffers {n}": t for n, t in enumerate([*guard.flat, *guard.before])}
    for number, state in enumerate(trainer.steps.optimizer.state.values()):
        state = {name: t for name, t in state.items() if isinstance(t, torch.Tensor)}
        tensors |= {f"{name} {number}": t for name, t in state.items()}
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "madgrad", "ngd"])
def test_every_tensor_stays_where_it_is(tmp_path, optimizer):
    """A real graph reads and writes at the addresses of its capture: no step may replace a tensor
    that outlives it by another one."""
    ours, recorder = graphed(tmp_path, optimizer=optimizer, ema_decay=0.9, clip=0.5, epochs=2)
    at_capture = {}
    capture = recorder.capture

    def watched(function):
        at_capture.update(places(ours))
        return capture(function)

    recorder.capture = watched
    ours.fit()
    assert at_capture and places(ours) == at_capture


def test_each_way_of_mixing_has_its_own_graph(tmp_path):
    ours, recorder = graphed(tmp_path, **made(CASES["mixup and CutMix by turns"]))
    ours.fit()
    assert recorder.captured == 2 and recorder.warm == 2 * 2 * WARM_UP


@pytest.mark.parametrize("stop", [2, 4, 6, 8])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, stop):
    options = {"optimizer": "adamw", "ema_decay": 0.9, "epochs": 3}
    plain = make_trainer(tmp_path / "plain", **options)
    plain.fit()
    schedule = {"schedule": lambda: Schedule("cosine", plain.plan.total_steps, 2)}
    first, _ = graphed(tmp_path / "ours", max_steps=stop, **options, **schedule)
    first.fit()
    ours, recorder = graphed(tmp_path / "ours", **options)
    ours.restore(ours.saver.store.load())
    ours.fit()
    assert recorder.replayed
    assert_same(everything(ours), everything(plain))


def test_saved_rates_are_numbers(tmp_path):
    ours, _ = graphed(tmp_path, optimizer="adamw", epochs=2)
    ours.fit()
    for group in ours.steps.optimizer.param_groups:
        assert isinstance(group["lr"], float) and group["capturable"] is False
    assert isinstance(ours.steps.learning_rate, float)


def test_a_replayed_step_that_is_not_finite_is_skipped(tmp_path):
    """And reported with its own number."""
    results = []
    for name in ("plain", "ours"):
        trainer = make_trainer(tmp_path / name, on_nonfinite="skip", ema_decay=0.9)
        if name == "ours":
            use_graphs(trainer, StandIn())
        whole, shift = trainer.loader.epoch, trainer.loader.normalize.shift
        good = shift.clone()

        def poisoned(epoch, start_step=0, whole=whole, shift=shift, good=good):
            batches = whole(epoch, start_step)
            for step in itertools.count():
                if (epoch, step) == (1, 2):
                    shift.fill_(float("nan"))
                batch = next(batches, None)
                if batch is None:
                    return
                yield batch
                shift.copy_(good)

        trainer.loader.epoch = poisoned
        trainer.fit()
        assert trainer.progress.left_out == (1, 6 + 2, 0)
        results.append(everything(trainer))
    assert_same(*results)


def test_a_failed_capture_is_reported_and_changes_nothing(tmp_path, capsys):
    plain = make_trainer(tmp_path / "plain", ema_decay=0.9)
    plain.fit()
    capsys.readouterr()
    ours, recorder = graphed(tmp_path / "ours", failure="no\n luck", ema_decay=0.9)
    ours.fit()
    said = capsys.readouterr().out
    assert said.count("--cuda_graphs: not used, because the capture failed (no luck)") == 1
    assert recorder.replayed == 0 and recorder.warm == 2 * WARM_UP
    assert_same(everything(ours), everything(plain))


def test_a_later_capture_that_fails_frees_the_other_graphs(tmp_path):
    """Ordinary steps need that memory."""
    options = CASES["mixup and CutMix by turns"]
    plain = make_trainer(tmp_path / "plain", **made(options))
    plain.fit()
    ours, recorder = graphed(tmp_path / "ours", **made(options))
    capture = recorder.capture

    def only_once(function):
        recorder.failure = "no memory" if recorder.captured else ""
        return capture(function)

    recorder.capture = only_once
    ours.fit()
    assert recorder.captured == 1 and not ours.steps.holds_memory
    assert_same(everything(ours), everything(plain))


@pytest.mark.parametrize(("batch", "step"), [(8, 6), (64, 64)])
def test_steps_smaller_than_a_batch_have_graphs(tmp_path, batch, step):
    """As with --global_batch, and for a data set smaller than a batch."""
    data = loader(batch)
    data.resize(batch, step)
    ours, recorder = graphed(tmp_path, data=data, epochs=8)
    ours.fit()
    assert recorder.captured == 1


def test_a_dry_run_times_replays(tmp_path):
    ours, recorder = graphed(tmp_path)
    times = time_steps(ours)
    steps = times.steps
    short = steps // 6  # the last steps of epochs, of 3 samples, are not replayed
    assert times.warm_up_steps == WARM_UP + 1
    assert recorder.replayed in (steps - short + 1, steps - short)
    assert times.samples in (4 * steps - short, 4 * steps - short - 1)


def test_the_host_keeps_pace_at_every_replay(tmp_path):
    ours, recorder = graphed(tmp_path)
    ours.fit()
    assert recorder.paced == recorder.replayed > 0


def test_rates_are_rounded_alike_in_ordinary_steps(tmp_path):
    """As a replay reads them; logs and checkpoints have the unrounded rate."""
    ours, _ = graphed(tmp_path, lr=0.1, rate_dtype=torch.float32)
    update, read = ours.steps.update_device, []

    def watched(step, ema_weight):
        read.append([group["lr"] for group in ours.steps.optimizer.param_groups])
        update(step, ema_weight)

    ours.steps.update_device = watched
    ours.prepare(0)
    ours.steps.guard.remember()
    ours.steps.forward_backward(next(iter(ours.loader.epoch(0))))
    told = [group["lr"] for group in ours.steps.optimizer.param_groups]
    ours.steps.update()
    assert read[0] == [torch.tensor(lr).item() for lr in told] != told
    assert [group["lr"] for group in ours.steps.optimizer.param_groups] == told


def test_graphs_are_given_up_when_memory_runs_out(tmp_path):
    """And the advice names their flag; not before there are any."""
    ours, recorder = graphed(tmp_path, epochs=1)
    assert ours.steps.free_memory() == "" and ours.steps.refused is None
    ours.fit()
    assert recorder.captured and ours.steps.holds_memory
    assert ours.steps.free_memory().startswith("add --no_cuda_graphs: ")
    assert not ours.steps.holds_memory and ours.steps.refused == "memory has run out"


def test_what_is_captured_reads_nothing_on_the_host(tmp_path):
    """Rates, step number and EMA weight come from tensors: other values on the host during replays
    change nothing."""
    options = {"optimizer": "adamw", "ema_decay": 0.9, "clip": 1.0}
    plain = make_trainer(tmp_path / "plain", **options)
    plain.fit()
    ours, recorder = graphed(tmp_path / "ours", **options)
    groups, progress = ours.steps.optimizer.param_groups, ours.progress
    average = ours.steps.average
    ema_weight, capture = average.ema_weight, recorder.capture

    def captured(function):
        replay = capture(function)

        def misled():
            rates, step = [group["lr"] for group in groups], progress.step
            for group in groups:
                group["lr"] = float("nan")
            progress.step, average.ema_weight = -1, lambda step: float("nan")
            replay()
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            progress.step, average.ema_weight = step, ema_weight

        return misled

    recorder.capture = captured
    ours.fit()
    assert recorder.replayed
    assert_same(everything(ours), everything(plain))
