"""Smaller pictures in the first epochs: which epochs, and which pixels."""

import pytest
import torch
from torch import nn
from torchvision.transforms.v2.functional import resize
from toy import history, loader, make_trainer, network

from utils.training.progressive_resizing import ProgressiveResizing, resized

LAST = torch.channels_last


@pytest.mark.parametrize("order", [LAST, torch.contiguous_format], ids=str)
def test_pictures_equal_torchvisions(order):
    pictures = torch.randn(2, 3, 8, 8).to(memory_format=order)
    small = resized(pictures, 5)
    torch.testing.assert_close(small, resize(pictures, [5, 5], antialias=True))
    assert small.is_contiguous(memory_format=order)
    assert torch.equal(resized(pictures, 8), pictures)


def test_a_batch_of_an_early_epoch():
    batch = next(iter(loader().epoch()))
    batch = batch._replace(clean=(batch.inputs[:2], batch.targets[:2]))
    schedule = ProgressiveResizing(4, epochs=2)
    for epoch in (0, 1):
        small = schedule(batch, epoch)
        assert torch.equal(small.inputs, resized(batch.inputs, 4))
        assert torch.equal(small.clean[0], resized(batch.inputs[:2], 4))
        assert small.targets is batch.targets and small[2:5] == batch[2:5]
    assert schedule(batch, 2) is batch


class Watched(nn.Sequential):
    def forward(self, x):
        self.seen.append((self.training, x.shape[-1]))
        return super().forward(x)


def test_training_alone_sees_smaller_pictures(tmp_path):
    model = Watched(*network())
    model.seen = []
    trainer = make_trainer(tmp_path, model=model, resizing=ProgressiveResizing(4, epochs=2))
    trainer.fit()
    steps = trainer.loader.steps_per_epoch
    trained = [size for training, size in model.seen if training]
    passes = len(trained) - 3 * steps  # without effect, at the start
    assert trained == [8] * passes + [4] * 2 * steps + [8] * steps
    assert {size for training, size in model.seen if not training} == {8}


def test_none_of_the_epochs_is_no_resizing(tmp_path):
    for name, resizing in (("plain", None), ("none", ProgressiveResizing(4, epochs=0))):
        make_trainer(tmp_path / name, resizing=resizing).fit()
    assert history(tmp_path / "plain") == history(tmp_path / "none")
