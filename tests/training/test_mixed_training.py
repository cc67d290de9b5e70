"""Training on mixed samples: what it equals, what it reports, what it can be combined with."""

import pytest
import torch
from toy import CPU, assert_same, everything, history, loader, make_trainer, network

from utils.data.batch import Batch
from utils.mixup.mixing import Mixing
from utils.training.objective import Precision


class AllOwn(Mixing):
    """Draws partners, with lambda 1."""

    def draw(self, n, epoch, step, generator):
        drawn = super().draw(n, epoch, step, generator)
        return drawn._replace(lam=drawn.lam * 0 + 1)


def weights(trainer) -> dict:
    return {name: tensor.clone() for name, tensor in trainer.steps.model.state_dict().items()}


def pieces(data, epoch=0, start=0) -> list[Batch]:
    return list(data.epoch(epoch, start))


# ---- the loader ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [21, 22, 23])
def test_any_division_of_a_step_mixes_the_same_pairs(n):
    """One batch of 8, two of 4 and four of 2 with blocks of 2, the short last step included."""

    def mixed(size, accumulation):
        mixing = Mixing(alpha=1.0, cutmix_alpha=1.0, block=2, per_sample=True, height=8, width=8)
        data = loader(size, accumulation, n=n, mixing=mixing)
        batches = pieces(data) + pieces(data, 1)
        inputs = [b.mix_plan.apply(b.inputs) for b in batches]
        partners = [b.targets[b.mix_plan.partner] for b in batches]
        return torch.cat(inputs), torch.cat(partners), torch.cat([b.mix_plan.lam for b in batches])

    whole = mixed(8, 1)
    for size, accumulation in ((4, 2), (2, 4)):
        for one, other in zip(whole, mixed(size, accumulation), strict=True):
            assert torch.equal(one, other)


def test_a_step_is_mixed_alike_after_a_resume():
    mixing = Mixing(alpha=1.0, block=4)
    data = loader(4, 2, mixing=mixing)
    whole, rest = pieces(data, 3), pieces(data, 3, 1)
    for one, other in zip(whole[2:], rest, strict=True):
        assert torch.equal(one.mix_plan.partner, other.mix_plan.partner)
        assert torch.equal(one.mix_plan.lam, other.mix_plan.lam)


def test_mixing_changes_neither_order_nor_augmentation():
    for one, other in zip(pieces(loader(4)), pieces(loader(4, mixing=Mixing(alpha=1.0, block=4))),
                          strict=True):  # fmt: skip
        assert torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)
        assert one.mix_plan is None and other.mix_plan is not None


@pytest.mark.parametrize("form", ["policy", "sample"])
def test_clean_samples_are_not_those_of_their_step(form):
    mixing = Mixing(alpha=1.0, block=4, meta_form=form, clean_samples=6, update_every=2)
    data = loader(4, 2, mixing=mixing)
    order, batches = data.order(1), pieces(data, 1)
    steps = [i // 2 for i in range(len(batches))]
    for number, (step, batch) in enumerate(zip(steps, batches, strict=True)):
        run_step = data.steps_per_epoch + step
        due = form == "sample" or (run_step % 2 == 0 and batch.ends_step)
        assert (batch.clean is not None) == due
        if due:
            inputs, targets = batch.clean
            places = [(8 * step + batch.step_samples + i) % len(order) for i in range(6)]
            assert not set(places) & set(range(8 * step, 8 * step + batch.step_samples))
            assert targets.tolist() == data.labels[order[places]].tolist()
            if places[0] + 4 <= len(order) and places[0]:  # augmented as in the next step
                assert torch.equal(inputs[:4], batches[number + 2 - number % 2].inputs[:4])


# ---- what it equals -----------------------------------------------------------------------------


def test_lambda_1_trains_as_without_mixup(tmp_path):
    plain = make_trainer(tmp_path / "plain")
    plain.fit()
    mixed = make_trainer(tmp_path / "mixed", mixing=AllOwn(alpha=1.0, block=4))
    mixed.fit()
    assert_same(everything(plain), everything(mixed))
    for one, other in zip(history(tmp_path / "plain"), history(tmp_path / "mixed"), strict=True):
        if one["split"] == "train":
            assert other.pop("lambda") == 1
            one["accuracy_weighted"] = one.pop("accuracy")
        assert one == other


@pytest.mark.parametrize("n", [21, 22, 23])
def test_accumulation_equals_one_batch(tmp_path, n):
    """Without BatchNorm and dropout, which depend on the batch."""
    results = []
    for size, accumulation in ((8, 1), (4, 2)):
        mixing = Mixing(alpha=1.0, block=4)
        trainer = make_trainer(
            tmp_path / f"{size}",
            model=network(norm=False),
            data=loader(size, accumulation, n=n, mixing=mixing),
            mixing=mixing,
        )
        trainer.fit()
        results.append(weights(trainer))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-4, atol=1e-6)


def test_mixing_ends_at_off_epoch(tmp_path):
    trainer = make_trainer(tmp_path, mixing=Mixing(alpha=1.0, block=4, off_epoch=2))
    trainer.fit()
    lines = [r for r in history(tmp_path) if r.get("average_over") == "epoch"]
    assert ["lambda" in line for line in lines] == [True, True, False]


# ---- what it reports ----------------------------------------------------------------------------


def test_figures_of_mixed_samples_have_their_own_names(tmp_path, capsys):
    mixing = Mixing(alpha=1.0, block=4)
    trainer = make_trainer(tmp_path, mixing=mixing, clean_accuracy=True)
    trainer.fit()
    train = [r for r in history(tmp_path) if r["split"] == "train"]
    assert train and all(
        {"accuracy_weighted", "accuracy_clean", "lambda"} <= r.keys() and "accuracy" not in r
        for r in train
    )
    assert all("accuracy" in r for r in history(tmp_path) if r["split"] == "test")
    assert all(0.5 <= r["lambda"] <= 1 for r in train)
    said = capsys.readouterr().out
    assert "accuracy weighted by lambda" in said and ", unmixed " in said


# ---- what it can be combined with ---------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "ngd"},
        {"optimizer": "adamw", "ema_decay": 0.9, "clip": 1.0},
        {"precision": "bf16", "accumulation": 2},
        {"precision": "fp16"},
        {"batch_size": 5, "freeze_until": 1},
        {"batch_size": 1, "norm": False},
    ],
    ids=str,
)
def test_it_trains_together_with(tmp_path, options):
    size = options.get("batch_size", 4)
    if not options.get("norm", True):  # BatchNorm cannot take a batch of one
        options = {"batch_size": size, "model": network(norm=False)}
    mixing = Mixing(
        alpha=0.4,
        cutmix_alpha=1.0,
        block=size,
        per_sample=True,
        different_classes=True,
        height=8,
        width=8,
    )
    trainer = make_trainer(tmp_path, mixing=mixing, **options)
    progress = trainer.fit()
    assert progress.step == trainer.plan.total_steps and progress.left_out.steps == 0
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())


def test_autocast_does_not_round_the_mixing():
    """Inputs are mixed in their own precision."""
    data = loader(4, mixing=Mixing(alpha=1.0, block=4))
    batch = pieces(data)[0]
    with Precision("bf16", CPU).autocast():
        assert batch.mix_plan.apply(batch.inputs).dtype == torch.float32
