"""Graphs of packed texts: batches are filled up to a few sizes, and each size has its graph. With a
fake recorder, whose replay calls the captured function again."""

import numpy as np
import pytest
import torch
from stand_in_recorder import StandIn
from toy import CPU, make_trainer, steps_of, use_graphs

from utils.data.texts.loader import SIZES, TextLoader
from utils.mixup.mixing import Mixing
from utils.models.transformer import Transformer
from utils.training.objective import Classification, Precision

EPOCHS, BATCH, TEXTS = 4, 4, 4 * 40 + 2


def trainer_of(folder, mixing=None, **options):
    """Of texts of 2 to 30 tokens, in float64."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 31, TEXTS)
    offsets = np.append(0, np.cumsum(lengths))
    data = TextLoader(
        rng.integers(1, 30, offsets[-1]), offsets, np.arange(TEXTS) % 3, batch_size=BATCH,
        device=CPU, max_len=30, shuffle=True, bucket_batches=10, mixing=mixing,
    )  # fmt: skip
    torch.manual_seed(1)
    model = Transformer(30, 3, layers=1, dim=8, heads=2, ffn=8, max_len=30, dropout=0.0).double()
    objective = Classification(
        model, Precision("fp32", CPU), 0.1, mixing is not None, mixes_inside=True
    )
    return make_trainer(
        folder, model=model, data=data, objective=objective, mixing=mixing, epochs=EPOCHS,
        lr=1e-3, clip=1.0, ema_decay=0.9, **options,
    )  # fmt: skip


def run(trainer) -> dict[str, torch.Tensor]:
    """What is left of a run."""
    for epoch in range(EPOCHS):
        for _ in steps_of(trainer, epoch):
            pass
    return trainer.steps.model.state_dict() | {"sums": trainer.steps.window}


def mixup(**options) -> Mixing:
    return Mixing(alpha=0.5, block=2, **options)


CASES = {
    "adamw": {"optimizer": "adamw"},
    "mixup": {"optimizer": "sgd", "mixing": mixup},
    "meta-mixup, ngd": {
        "optimizer": "ngd",
        "mixing": lambda: mixup(meta_form="policy", clean_samples=4, update_every=3),
    },
}


@pytest.mark.parametrize(("case", "asked"), [*((case, True) for case in CASES), ("adamw", False)])
def test_a_run_is_the_ordinary_one(tmp_path, case, asked):
    """Up to rounding. The last batch of an epoch, of 2 texts, is an ordinary one."""
    options = dict(CASES[case])
    make_mixing = options.pop("mixing", lambda: None)
    plain = run(trainer_of(tmp_path / "plain", make_mixing(), **options))
    trainer, recorder = trainer_of(tmp_path / "ours", make_mixing(), **options), StandIn()
    use_graphs(trainer, recorder, asked)
    ours = run(trainer)
    kinds = 2 if options["optimizer"] == "ngd" else 1
    assert 1 < recorder.captured <= kinds * SIZES and recorder.replayed >= 15
    tolerance = 1e-6 if options["optimizer"] == "ngd" else 1e-9
    for name, tensor in plain.items():
        torch.testing.assert_close(ours[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


def test_batches_are_as_they_were_once_graphs_are_given_up(tmp_path):
    trainer, recorder = trainer_of(tmp_path, optimizer="adamw"), StandIn(failure="no luck")
    use_graphs(trainer, recorder)
    batches = trainer.loader.epoch(0)
    assert next(batches).inputs.fillers
    trainer.steps.free_memory()
    assert next(batches).inputs.fillers
    for _ in steps_of(trainer, 0):
        pass
    assert trainer.steps.refused.startswith("the capture failed")
    assert not next(batches).inputs.fillers
