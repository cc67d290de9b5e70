"""Checkpoints of several ranks: whole tensors are restored to the bit, whoever wrote them."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import toy
from torch import nn

from utils.checkpoints import checkpoint as checkpoint_module
from utils.checkpoints.checkpoint import Checkpoints, DamagedCheckpoint, read_checkpoint
from utils.checkpoints.saver import Saver
from utils.checkpoints.states import random_states, restore_random_states
from utils.distributed.exchange import ProcessExchange
from utils.distributed.strategies.base import Strategy
from utils.errors import UserError
from utils.exchange import Exchange, Rows
from utils.optim.factory import build_optimizer
from utils.optim.schedules import Schedule
from utils.training.average import Average
from utils.training.guard import Guard
from utils.training.objective import Precision
from utils.training.progress import Progress
from utils.training.train_step import StepParts, TrainStep

OPTIMIZERS = ("sgd", "adamw", "ngd", "muon", "lookahead")


class Metrics:
    """In place of MetricsLog; for the next `full` calls the disk is full."""

    full = 0

    def position(self):
        if self.full:
            self.full -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return 17

    def sync(self):
        pass


def network() -> nn.Module:
    """With rows that 4 does not divide, fewer rows than ranks, one row, and none (a scalar);
    Linear(5, 12) has a Fisher matrix of the shape of a quarter of it, Linear(5, 3) of its own."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(5, 12), nn.Linear(5, 3), nn.Linear(4, 1)
    )
    model.scale = nn.Parameter(torch.tensor(1.5))
    return model


def divide(exchange, model: nn.Module) -> None:
    """Replaces every parameter by this rank's rows, as FSDP divides them."""
    for module in model.modules():
        for name, whole in list(module.named_parameters(recurse=False)):
            if whole.ndim == 0:
                continue
            most = -(-len(whole) // exchange.size)
            start, end = (min((exchange.rank + i) * most, len(whole)) for i in range(2))
            part = nn.Parameter(whole.detach()[start:end].clone())
            setattr(module, name, part)
            exchange.divide(part, Rows(whole.shape, start, end))


def train_step_of(
    kind: str, seed: int, exchange=None, steps: int = 0, divided: bool = True
) -> TrainStep:
    """After `steps` steps by random gradients; divided where there is an exchange."""
    torch.manual_seed(seed)
    model = network()
    if divided and exchange is not None:
        divide(exchange, model)
    strategy = Strategy(model, exchange)
    lookahead = {"lookahead_k": 2} if kind == "lookahead" else {}
    optimizer = build_optimizer(
        "sgd" if lookahead else kind, model, lr=0.1, weight_decay=1e-3, momentum=0.9, **lookahead
    )
    guard = Guard(model, strategy)
    average = Average(model, 0.9, strategy)
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        model[1].running_mean += torch.randn(6)
        model[1].num_batches_tracked += 1
        optimizer.step()
        average.update(average.ema_weight(step), torch.tensor(False))
    parts = StepParts(
        strategy=strategy,
        objective=None,  # no pass is made
        optimizer=optimizer,
        schedule=Schedule("constant", 10, 0),
        precision=Precision("fp32", torch.device("cpu")),
        progress=Progress(step=steps),
        guard=guard,
        average=average,
    )
    return TrainStep(parts)


def saver_of(folder, exchange, keep=3) -> Saver:
    """With a process group of its own, and metrics on rank 0 alone."""
    own = ProcessExchange(dist.new_group(), exchange.rank) if exchange.size > 1 else exchange
    metrics = Metrics() if exchange.rank == 0 else None
    said = []
    console = SimpleNamespace(say=said.append, said=said)
    return Saver(Checkpoints(folder, keep=keep), metrics, console, exchange=own)


def assert_parts_equal(one, other) -> None:
    for part in ("model", "optimizer", "average"):
        tensors, others = one.parts[part], other.parts[part]
        assert list(tensors) == list(others), part
        for name, tensor in tensors.items():
            assert tensor.dtype == others[name].dtype, name
            assert torch.equal(tensor, others[name]), name


def assert_same_state(one: dict, other: dict) -> None:
    of_the_process = {"random", "metrics_bytes"}
    assert {k: v for k, v in one.items() if k not in of_the_process} == {
        k: v for k, v in other.items() if k not in of_the_process
    }


def written_alone(folder, kind="sgd", steps=3) -> Path:
    train_step = train_step_of(kind, 1, steps=steps)
    checkpoint = train_step.snapshot()
    assert checkpoint.rows is None and len(checkpoint.state["random"]) == 1
    saver_of(folder, Exchange()).save(checkpoint, None, final=True)
    return Path(folder, f"step-{steps:08}")


def passed_on(exchange, source: str, target: str, kind: str, divided: bool) -> list[str]:
    """Loads a checkpoint and saves it again; returns the names of the files."""
    read = read_checkpoint(Path(source))
    train_step = train_step_of(kind, 70 + exchange.rank, exchange, divided=divided)
    train_step.restore(read)
    for name, parameter in train_step.model.named_parameters():
        assert torch.equal(parameter, exchange.part(parameter, read.model[name])), name
        assert torch.equal(
            train_step.average.mean[name], exchange.part(parameter, read.weights[name])
        )
    saver = saver_of(target, exchange)
    saver.save(train_step.snapshot(), None, final=True)
    assert not saver.console.said
    exchange.barrier()
    return sorted(path.name for path in Path(target, Path(source).name).iterdir())


def names(size: int) -> list[str]:
    shards = [
        f"{part}.rank-{rank:05}-of-{size:05}.safetensors"
        for part in ("average", "model", "optimizer")
        for rank in range(1, size + 1)
    ]
    return sorted([*shards, "state.json", "SHA256SUMS"])


WHOLE = ["SHA256SUMS", *(f"{part}.safetensors" for part in ("average", "model", "optimizer"))]
WHOLE += ["state.json"]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_from_one_to_two_to_four_and_back(worlds, tmp_path, kind):
    first = written_alone(tmp_path / "alone", kind)
    expected, source = read_checkpoint(first), first
    for number, (size, divided) in enumerate([(2, False), (4, True), (2, True), (4, True)]):
        target = tmp_path / str(number)
        found = worlds(size).run(passed_on, str(source), str(target), kind, divided)
        assert found == [names(size) if divided else WHOLE] * size
        source = target / first.name
        read = read_checkpoint(source)
        assert len(read.state["random"]) == size and read.state["metrics_bytes"] == 17
        assert_parts_equal(read, expected)
        assert_same_state(read.state, expected.state)
    last = train_step_of(kind, 9)
    last.restore(read)
    assert last.progress.step == 3
    again = Checkpoints(tmp_path / "again").save(last.snapshot().copy())
    for name in WHOLE[1:-1]:
        assert (again / name).read_bytes() == (first / name).read_bytes(), name


def test_divided_over_one_it_is_the_plain_layout(worlds, tmp_path):
    first = written_alone(tmp_path / "alone")
    [found] = worlds(1).run(passed_on, str(first), str(tmp_path / "one"), "sgd", True)
    assert found == WHOLE
    for name in WHOLE[1:-1]:
        assert (tmp_path / "one" / first.name / name).read_bytes() == (first / name).read_bytes()


def test_only_the_rows_of_a_rank_are_in_its_file(worlds, tmp_path):
    first = written_alone(tmp_path / "alone")
    worlds(4).run(passed_on, str(first), str(tmp_path / "four"), "sgd", True)
    shards = json.loads((tmp_path / "four" / first.name / "state.json").read_text())["shards"]
    rows = {file: place.get("0.weight") for file, place in shards.items()}
    for rank in range(3):
        file = f"model.rank-{rank + 1:05}-of-00004.safetensors"
        assert rows[file] == {"shape": [6, 3, 3, 3], "offset": [2 * rank, 0, 0, 0]}
    assert rows["model.rank-00004-of-00004.safetensors"] is None
    assert "shards" not in read_checkpoint(tmp_path / "four" / first.name).state


def save_steps(exchange, folder: str, steps: list[int], keep: int) -> None:
    train_step = train_step_of("sgd", 1, exchange, steps=1)
    saver = saver_of(folder, exchange, keep)
    for step in steps:
        train_step.progress.step = step
        saver.save(train_step.snapshot(), steps[0], final=step == steps[-1])


@pytest.mark.parametrize("size", (2, 4))
def test_the_newest_and_the_best_are_kept_by_all_ranks(worlds, tmp_path, size):
    worlds(size).run(save_steps, str(tmp_path / "run"), [1, 2, 3, 4, 4], 2)
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert left == ["step-00000001", "step-00000003", "step-00000004"]


def test_every_damaged_file_is_found(worlds, tmp_path):
    worlds(4).run(save_steps, str(tmp_path), [1, 2], 3)
    said = []
    store = Checkpoints(tmp_path, warn=said.append)
    for file in sorted((tmp_path / "step-00000002").iterdir()):
        good = file.read_bytes()
        for position in (0, len(good) // 2, len(good) - 1):
            bad = bytearray(good)
            bad[position] ^= 1
            file.write_bytes(bad)
            assert store.load().step == 1
            assert file.name == "SHA256SUMS" or file.name in said[-1]
        file.unlink()
        assert store.load().step == 1 and "No such file" in said[-1]
        file.write_bytes(good)
    assert store.load().step == 2


def test_a_checkpoint_with_missing_rows_is_damaged(worlds, tmp_path):
    """Although all checksums are right."""
    worlds(2).run(save_steps, str(tmp_path), [1], 3)
    path = tmp_path / "step-00000001"
    (path / "model.rank-00002-of-00002.safetensors").unlink()
    lines = (path / "SHA256SUMS").read_text().splitlines(keepends=True)
    (path / "SHA256SUMS").write_text("".join(li for li in lines if "model.rank-00002" not in li))
    with pytest.raises(DamagedCheckpoint, match=r"rows of .* are missing"):
        read_checkpoint(path)


class FullDisk:
    """Makes the writing of files find no room."""

    def __enter__(self):
        self.kept = checkpoint_module.write_files

        def write_files(folder, files):
            for _ in files:
                raise OSError(errno.ENOSPC, "No space left on device")

        checkpoint_module.write_files = write_files

    def __exit__(self, *_):
        checkpoint_module.write_files = self.kept


def full_on(exchange, folder: str, divided: bool, rank: int, metrics: bool) -> tuple:
    """Saves step 1; steps 2 and 3, the last, find no room on `rank`; then there is room."""
    train_step = train_step_of("sgd", 1, exchange if divided else None, steps=1)
    saver = saver_of(folder, exchange)
    saver.save(train_step.snapshot(), None, final=True)
    train_step.progress.step, lines = 2, []
    if metrics and exchange.rank == 0:
        saver.metrics.full = 2
    with FullDisk() if exchange.rank == rank and not metrics else open(os.devnull):
        saver.save(train_step.snapshot(), None, final=False)
        saver.wait()
        train_step.progress.step = 3
        try:
            saver.save(train_step.snapshot(), None, final=True)
        except UserError as error:
            lines.append(str(error))
    left = sorted(os.listdir(folder))
    exchange.barrier()
    train_step.progress.step = 4
    saver.save(train_step.snapshot(), None, final=True)
    return saver.console.said, lines, left


@pytest.mark.parametrize(
    "divided, rank, metrics",
    [(True, 1, False), (True, 0, False), (False, 0, False), (True, 0, True), (False, 0, True)],
)
def test_all_ranks_learn_that_the_disk_of_one_is_full(worlds, tmp_path, divided, rank, metrics):
    told = worlds(2).run(full_on, str(tmp_path / "run"), divided, rank, metrics)
    where = f" (rank {rank})" if divided else ""
    for number, (said, lines, left) in enumerate(told):
        expected = f"No space left on device{where}; that of step 1 is intact; make room"
        assert said == (
            [f"no checkpoint of step 2: {expected}; the run goes on and tries again"]
            if number == 0
            else []
        )
        [line] = lines
        assert line.startswith(f"no checkpoint of step 3: {expected} and --resume")
        assert left == ["step-00000001"]
    assert Checkpoints(tmp_path / "run").load().step == 4


def dies(exchange, folder: str) -> None:
    """Rank 1 dies while it writes step 2; rank 0 leaves in a file what it sees."""
    train_step = train_step_of("sgd", 1, exchange, steps=1)
    saver = saver_of(folder, exchange)
    saver.save(train_step.snapshot(), None, final=True)
    if exchange.rank == 1:
        checkpoint_module.write_files = lambda *_: os._exit(9)
    train_step.progress.step = 2
    checkpoint = train_step.snapshot()
    try:
        saver.save(checkpoint, None, final=False)
        saver.wait()
    except RuntimeError as error:
        Path(folder, "seen").write_text(type(error).__name__)
        raise


def test_a_rank_that_dies_while_it_writes_leaves_the_checkpoint_before(worlds, tmp_path):
    with pytest.raises(AssertionError, match="rank 1: it died"):
        worlds(2).run(dies, str(tmp_path))
    assert (tmp_path / "seen").read_text() in ("RuntimeError", "DistBackendError")
    said = []
    store = Checkpoints(tmp_path, warn=said.append)
    assert store.load().step == 1 and not said
    assert list(tmp_path.glob(".writing-*"))
    worlds(2).run(save_steps, str(tmp_path), [3], 3)
    assert store.load().step == 3 and not list(tmp_path.glob(".*"))


def draws(exchange, folder: str, seed: int, old: bool) -> tuple:
    """(a number drawn before saving, after restoring, and after restoring a step later)"""
    torch.manual_seed(exchange.rank)
    train_step = train_step_of("sgd", 5, exchange, divided=False)
    torch.manual_seed(100 + exchange.rank)
    saved = train_step.snapshot()
    drawn = torch.rand(()).item()
    states = saved.state["random"]
    if old:
        states = states[0]
    after = []
    for step in (7, 8):
        torch.manual_seed(seed)
        restore_random_states(states, exchange.rank, step)
        after.append(torch.rand(()).item())
    return drawn, *after


def test_random_states_of_all_ranks_are_restored(worlds, tmp_path):
    for own in worlds(4).run(draws, str(tmp_path), 3, False):
        assert own[0] == own[1] == own[2]
    alone, *others = worlds(4).run(draws, str(tmp_path), 3, True)
    assert alone[0] == alone[1] == alone[2]
    assert len({number for other in others for number in other[1:]}) == 6
    assert worlds(4).run(draws, str(tmp_path), 3, True)[1:] == others
    assert worlds(4).run(draws, str(tmp_path), 4, True)[1] != others[0]


def test_random_states_of_an_older_checkpoint_are_restored():
    torch.manual_seed(3)
    saved, drawn = random_states(), torch.rand(3)
    restore_random_states(saved)
    assert torch.equal(torch.rand(3), drawn)


def test_another_model_is_refused_and_nothing_changed(tmp_path):
    path = written_alone(tmp_path)
    train_step = train_step_of("sgd", 2)
    train_step.model[2] = nn.Linear(5, 11)
    train_step.strategy = Strategy(train_step.model)
    before = train_step.model.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    with pytest.raises(UserError, match=r"2.weight is \(12, 5\), in the model \(11, 5\)"):
        train_step.restore(read_checkpoint(path))
    for name, tensor in train_step.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def whole_and_resumed(exchange, folder: Path) -> list[list[float]]:
    """The losses in the log of a run, at steps 4 and 6, and in that of one that goes on from its
    step 2."""
    folder, found = folder / str(exchange.rank), []
    for name in ("whole", "resumed"):
        trainer = toy.make_trainer(
            folder / name, exchange=exchange, batch_size=2, epochs=1, log_every=4, eval_every=0,
            save_steps=2,
        )  # fmt: skip
        if found:
            trainer.restore(read_checkpoint(folder / "whole/checkpoints/step-00000002"))
        trainer.fit()
        records = toy.history(folder / name)
        found.append([r["loss"] for r in records if r.get("average_over") == "steps"])
    return found


def test_two_ranks_resumed_between_log_lines_log_the_loss_of_all_steps(worlds, tmp_path):
    for whole, resumed in worlds(2).run(whole_and_resumed, tmp_path):
        assert len(whole) == len(resumed) == 2
        assert resumed == pytest.approx(whole, rel=1e-12)
