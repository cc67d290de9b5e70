"""Contenders have equal update rules and batches, and sizes that fit."""

import stand_in_for_apex
import torch
from small_comparisons import TINY, options_of

from benchmarks import compare, gpu, speed
from benchmarks.cases import text_case
from benchmarks.contenders import Way, pad
from benchmarks.fused import bytes_of_a_sample
from utils.models.resnet import ResNet


def test_both_have_the_same_update_rule(tmp_path):
    """The same learning rates and weight decays for all parameters."""
    case = text_case(TINY, torch.device("cpu"), 0)
    options = options_of(tmp_path / "x.json")
    ours = compare.in_this_process(case, Way(True, ""), options, tmp_path)
    usual = compare.in_this_process(case, Way(False, ""), options, tmp_path)
    groups = [*ours.trainer.steps.optimizer.param_groups, *usual.optimizer.param_groups]
    assert {(group["lr"], group["weight_decay"]) for group in groups} == {(1e-4, 0.01)}
    assert type(ours.trainer.steps.optimizer) is type(usual.optimizer) is torch.optim.AdamW


def test_texts_are_padded_to_the_longest():
    ids, labels = pad([(torch.tensor([1, 2, 3]), 0), (torch.tensor([4]), 2)])
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0]] and labels.tolist() == [0, 2]


def test_a_gpu_of_80_gb_is_large_enough():
    """For the contender that needs the most, in fp32, beside the graphs of two others in bf16; with
    a fifth more for the workspaces of convolutions, and a gigabyte for each process."""
    model = ResNet(gpu.SIZES.depth, 10)
    kept = bytes_of_a_sample(model, lambda n: model(torch.randn(n, 3, 32, 32)))
    ways = speed.ways_of("pictures", "bf16", cuda=True, compiled=True)
    graphs = sum(way.graphs for way in ways.values())
    step = 1.2 * kept * gpu.SIZES.picture_batch
    assert graphs == 2 and step + graphs * step / 2 + len(ways) * 1e9 < 80e9


def test_apexs_optimizer_is_a_contender_where_it_is_installed(monkeypatch, tmp_path):
    name = "autocast, Apex"
    assert name not in speed.ways_of("texts", "bf16", cuda=True, compiled=False)
    stand_in_for_apex.install(monkeypatch)
    assert name not in speed.ways_of("texts", "bf16", cuda=False, compiled=False)
    way = speed.ways_of("texts", "bf16", cuda=True, compiled=False)[name]
    case, options = text_case(TINY, torch.device("cpu"), 0), options_of(tmp_path / "x.json")
    usual = compare.in_this_process(case, way, options, tmp_path)
    assert type(usual.optimizer) is stand_in_for_apex.FusedAdam
    assert usual.steps(1) > 0
