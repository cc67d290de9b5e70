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
def test_only_embeddings_and_vectors_may_be_trained(name):
    model = text_model()
    for layer in (model["hidden"], model["head"]):
        layer.weight.requires_grad_(False)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build(name, model, lr=0.1, weight_decay=0.1)
    for step in range(4):
        for parameter in model.parameters():
            if parameter.requires_grad:
                generator = torch.Generator().manual_seed(step)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    for n, parameter in model.named_parameters():
        assert torch.equal(parameter, before[n]) != parameter.requires_grad
    if name == "ngd":
        adams = [g for g in optimizer.param_groups if g["adam"]]
        assert sum(len(group["params"]) for group in adams) == 6


@each_optimizer
def test_groups_keep_the_peak_rate(name):
    optimizer = build(name, small_model(), lr=0.025)
    for group in optimizer.param_groups:
        assert group["lr"] == group["base_lr"] == 0.025 * group.get("lr_scale", 1)


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


def stepped_by_adam(model: nn.Module, **settings) -> set[str]:
    """The names of the parameters that NGD steps as AdamW does."""
    groups = build("ngd", model, **settings).param_groups
    own = {p for group in groups if group["adam"] for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    return {name for name, parameter in model.named_parameters() if parameter in own}


@pytest.mark.parametrize("decay_all", [False, True])
def test_ngd_leaves_embeddings_norms_and_biases_to_adam(decay_all):
    settings = {"ngd_orthogonal": False, "decay_all": decay_all}
    assert stepped_by_adam(text_model(), **settings) == {
        "tokens.weight", "bag.weight", "hidden.bias", "norm.weight", "norm.bias", "head.bias",
    }  # fmt: skip
    assert stepped_by_adam(small_model(), **settings) == {
        "0.bias", "1.weight", "1.bias", "6.bias",
    }  # fmt: skip
    groups = build("ngd", text_model(), weight_decay=0.1, **settings).param_groups
    decays = {group["weight_decay"] for group in groups if group["adam"]}
    assert decays == ({0.1} if decay_all else {0.0})


def test_ngd_leaves_to_adam_what_the_model_lists():
    model = Named({"position"})
    assert "position" in stepped_by_adam(model)
    assert "body.tokens.weight" not in stepped_by_adam(model)


def test_ngd_with_orthogonal_steps_leaves_the_classifier_to_adam():
    model = text_model()
    usual = stepped_by_adam(model, ngd_orthogonal=False)
    assert stepped_by_adam(model) - usual == {"head.weight"}
    others = stepped_by_adam(model, heads=[model.hidden.weight])
    assert others - usual == {"hidden.weight"}


def test_ngd_leaves_nothing_to_adam_in_the_papers_form_or_where_told():
    assert not stepped_by_adam(text_model(), ngd_norm="gradient")
    assert not stepped_by_adam(text_model(), ngd_adam=False)
    assert stepped_by_adam(text_model(), ngd_norm="gradient", ngd_adam=True)


def test_ngd_takes_the_papers_form_with_steps_as_long_as_the_gradient():
    keys = ("power", "momentum_first", "alpha")
    forms = {"fixed": (0.5, True, 0.01), "gradient": (1.0, False, 4.0)}
    for norm, expected in forms.items():
        group = build("ngd", small_model(), ngd_norm=norm).param_groups[0]
        assert tuple(group[key] for key in keys) == expected
    group = build("ngd", small_model(), ngd_power=1.0, ngd_momentum_first=False).param_groups[0]
    assert tuple(group[key] for key in keys) == (1.0, False, 4.0)


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
        "ngd": (0.02, 0.05, 0.9),
    }
    assert {name: tuple(OPTIMIZERS[name].defaults().values()) for name in published} == published
    assert OPTIMIZERS["ngd"].defaults(ngd_norm="gradient") == OPTIMIZERS["sgd"].defaults()
    assert OPTIMIZERS["muon"].defaults(transformer=True) == OPTIMIZERS["muon"].defaults()


def test_defaults_of_ngd_that_depend_on_others():
    ngd = OPTIMIZERS["ngd"]
    assert tuple(ngd.defaults(transformer=True).values()) == (4e-3, 0.05, 0.9)
    of_paper = {"ngd_norm": "gradient"}
    assert ngd.defaults(transformer=True, **of_paper) == OPTIMIZERS["sgd"].defaults()
    for own, expected in (
        ({}, ("patch", True, 0.4)),
        (of_paper, ("all", False, 1.0)),
        ({"ngd_orthogonal": False}, ("patch", False, 1.0)),
        (of_paper | {"ngd_orthogonal": True}, ("all", True, 0.4)),
        ({"adam_lr_scale": 0.7}, ("patch", True, 0.7)),
    ):
        values = own | ngd.own_defaults(**own)
        names = ("ngd_axes", "ngd_orthogonal", "adam_lr_scale")
        assert tuple(values[name] for name in names) == expected
