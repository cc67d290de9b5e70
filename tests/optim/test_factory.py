"""The factory: which parameters an optimizer gets, in which groups, with which settings."""

import pytest
import torch
from optimizer_tools import backward, build, each_optimizer, small_model, text_model
from torch import nn

from utils.optim.factory import parameter_groups
from utils.optim.table import OPTIMIZERS


def test_no_decay_on_vectors_unless_asked():
    model = small_model()
    decayed, others = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    assert {p.ndim for p in decayed["params"]} == {2, 4}
    assert {p.ndim for p in others["params"]} == {1}
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))
    [everything] = parameter_groups(model, 0.1, decay_all=True)
    assert everything["weight_decay"] == 0.1
    assert everything["params"] == list(model.parameters())


def test_no_decay_on_embeddings_unless_asked():
    model = text_model()
    decayed, others = parameter_groups(model, 0.1)
    assert decayed["params"] == [model["hidden"].weight, model["head"].weight]
    assert others["weight_decay"] == 0.0 and len(others["params"]) == 6
    groups = parameter_groups(model, 0.1, decay_all=True)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1]
    assert {p for g in groups for p in g["params"]} == {*model.parameters()}
    model["tokens"].requires_grad_(False)
    assert len(parameter_groups(model, 0.1)[1]["params"]) == 5


class Named(nn.Module):
    """A model that names what has no weight decay, by the same method as timm's models."""

    def __init__(self, names):
        super().__init__()
        self.body, self.names = text_model(), names
        self.position = nn.Parameter(torch.zeros(1, 4, 6))

    def no_weight_decay(self):
        return self.names


def test_a_model_names_what_has_no_decay_besides_vectors():
    model = Named({"position", "body.hidden.weight", "unknown"})
    decayed, others = parameter_groups(model, 0.1)
    body = model.body
    assert {*decayed["params"]} == {body["tokens"].weight, body["bag"].weight, body["head"].weight}
    assert {model.position, body["hidden"].weight, body["norm"].weight} < {*others["params"]}
    groups = parameter_groups(model, 0.1, decay_all=True)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1]
    model = Named([])
    assert len(parameter_groups(model, 0.1)[0]["params"]) == 5


def test_a_shared_weight_has_no_decay_if_any_of_its_names_is_listed():
    model = Named({"head.weight"})
    model.head = nn.Linear(4, 6)
    model.head.weight = model.body["tokens"].weight
    decayed, others = parameter_groups(model, 0.1)
    assert model.head.weight in {*others["params"]} - {*decayed["params"]}


def test_muon_leaves_to_adam_what_the_model_lists():
    model = Named({"position"})
    optimizer = build("muon", model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert not optimizer.state[model.position]["use_muon"]


@pytest.mark.parametrize("decay_all", [False, True])
def test_muon_leaves_embeddings_and_the_classifier_to_adam(decay_all):
    model = text_model()
    optimizer = build("muon", model, decay_all=decay_all)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    uses = {name: optimizer.state[p]["use_muon"] for name, p in model.named_parameters()}
    assert [name for name, muon in uses.items() if muon] == ["hidden.weight"]
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


@each_optimizer
def test_frozen_parameters_are_left_out(name):
    model = small_model()
    model[0].requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    optimizer = build(name, model)
    backward(model, 0)
    optimizer.step()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}
    assert torch.equal(model[0].weight, frozen)


@each_optimizer
def test_groups_keep_the_peak_rate(name):
    optimizer = build(name, small_model(), lr=0.025)
    assert {group["base_lr"] for group in optimizer.param_groups} == {0.025}
    assert {group["lr"] for group in optimizer.param_groups} == {0.025}


def test_ngd_rounds_its_products_if_training_rounds_its_own():
    for precision, expected in (("fp32", "float32"), ("bf16", "fast"), ("fp16", "fast")):
        optimizer = build("ngd", small_model(), **OPTIMIZERS["ngd"].products(precision))
        assert {group["products"] for group in optimizer.param_groups} == {expected}
    assert OPTIMIZERS["sgd"].products("bf16") == {}


@pytest.mark.parametrize(("norm", "decoupled"), [("fixed", True), ("gradient", False)])
def test_ngd_with_a_fixed_norm_decouples_weight_decay(norm, decoupled):
    optimizer = build("ngd", small_model(), ngd_norm=norm)
    for group in optimizer.param_groups:
        assert (group["norm"], group["decoupled"]) == (norm, decoupled)


def test_a_setting_of_another_optimizer_is_refused():
    with pytest.raises(TypeError, match="ngd_alpha"):
        build("sgd", small_model(), ngd_alpha=2.0)


def test_defaults_are_those_of_the_published_runs():
    published = {
        "sgd": (0.1, 5e-4, 0.9),
        "adamw": (1e-3, 0.05, None),
        "lamb": (1.25e-3, 0.02, None),
        "muon": (1e-3, 0.05, 0.95),
        "madgrad": (2.5e-4, 1e-4, 0.9),
        "ngd": (9e-3, 0.05, 0.9),
    }
    assert {name: tuple(OPTIMIZERS[name].defaults().values()) for name in published} == published
    assert OPTIMIZERS["ngd"].defaults(ngd_norm="gradient") == OPTIMIZERS["sgd"].defaults()
