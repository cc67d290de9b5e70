"""fewhours.fit: networks and data of one's own."""

import re

import numpy as np
import pytest
import torch
from quick_runs import quick, raise_in_step
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import fewhours

LABELS = np.arange(90) % 3
INPUTS = np.random.default_rng(0).normal(size=(90, 4)) + 6 * np.eye(3, 4)[LABELS]
FLAGS = {"device": "cpu", "threads": 1, "batch_size": 16, "lr": 0.02}


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    quick(monkeypatch)
    monkeypatch.chdir(tmp_path)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


class Noisy(Dataset):
    """Draws in each sample, and does not name its labels."""

    classes = ("a", "b", "c")

    def __len__(self):
        return len(LABELS)

    def __getitem__(self, index):
        return torch.tensor(INPUTS[index]).float() + 0.1 * torch.randn(4), LABELS[index]


def test_arrays_train_the_network_in_place():
    net, test = network(), (INPUTS[:30], LABELS[:30])
    run = fewhours.fit(net, (INPUTS, LABELS), test_set=test, epochs=6, ema_decay=0.9, **FLAGS)
    assert run.metrics["split"] == "test" and run.accuracy > 90 and run.status == "finished"
    right = net(torch.tensor(test[0]).float()).argmax(1).numpy() == test[1]
    assert 100 * right.mean() == pytest.approx(run.accuracy)
    assert run.summary["train_samples"] == 90 and not net.training


def test_a_dataset_resumes_to_the_bit(monkeypatch):
    data, tensors = Noisy(), TensorDataset(torch.tensor(INPUTS).float(), torch.tensor(LABELS))
    whole, part = network(), network()
    run = fewhours.fit(whole, data, tensors, max_steps=8, mixup=0.2, use="last", **FLAGS)
    assert run.metrics["split"] == "val" and "p_a" in run.mistakes(99)[0]
    with monkeypatch.context() as patch:
        raise_in_step(patch, 4, 2)
        run = fewhours.fit(part, data, tensors, max_steps=8, mixup=0.2, use="last", **FLAGS)
    assert run.status == "interrupted"
    run = fewhours.fit(network(), data, tensors, resume=run.folder, use="last")
    assert run.summary["steps"] == 8
    resumed = network()
    run = fewhours.fit(resumed, data, tensors, resume=run.folder, use="last")  # it is finished
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(fewhours.UserError, match="given its model and data"):
        run.predict("pictures")


@pytest.mark.parametrize(
    ("model", "data", "flags", "told"),
    [
        (nn.Linear(5, 3), (INPUTS, LABELS), {}, "has to answer inputs (1, 4) of torch.float32"),
        (nn.Linear(4, 2), (INPUTS, LABELS), {}, "train_set has labels from 0 to 2, and the model"),
        (nn.Linear(4, 3), (INPUTS, LABELS[:5]), {}, "a pair of arrays, inputs and labels, of the"),
        (nn.Linear(4, 3), (INPUTS, LABELS), {"data_dir": "x"}, "fewhours.fit has no data_dir"),
        (nn.Linear(4, 3), (INPUTS, LABELS), {"epocs": 1}, "unknown flag --epocs, did you mean"),
    ],
)
def test_mistakes(model, data, flags, told):
    with pytest.raises(fewhours.UserError, match=re.escape(told)):
        fewhours.fit(model, data, **flags)
