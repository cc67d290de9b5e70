"""A frozen backbone does not change, needs no gradient, and is unfrozen at its epoch."""

import torch
from toy import history, make_trainer, network

from utils.training.controls import Freeze

HEAD = "7"  # the last layer of toy.network


def test_only_the_head_changes_while_frozen(tmp_path):
    trainer = make_trainer(tmp_path, freeze_until=2, epochs=4)
    before = {name: t.clone() for name, t in trainer.steps.model.state_dict().items()}
    seen = {}

    def measure(is_last, real=trainer.evaluate):
        seen[trainer.progress.step] = {
            name: t.clone() for name, t in trainer.steps.model.state_dict().items()
        }
        return real(is_last)

    trainer.evaluate = measure
    trainer.fit()
    frozen = seen[2 * trainer.loader.steps_per_epoch]
    thawed = seen[4 * trainer.loader.steps_per_epoch]
    for name, tensor in before.items():
        assert torch.equal(frozen[name], tensor) != name.startswith(HEAD), name
        assert not torch.equal(thawed[name], tensor), name
    events = [r for r in history(tmp_path) if r["split"] == "event"]
    assert [(r["event"], r["epoch"]) for r in events] == [("unfrozen", 2.0)]


def test_no_graph_is_recorded_below_the_head():
    model = network()
    freeze = Freeze(model, (HEAD,))
    freeze.apply(0)
    features = []
    model[6].register_forward_hook(lambda module, inputs, output: features.append(output))
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert features[0].grad_fn is None
    grads = {name for name, p in model.named_parameters() if p.grad is not None}
    assert grads == {f"{HEAD}.weight", f"{HEAD}.bias"}
    assert not model[1].training and not model[4].training and model[7].training


def test_it_is_unfrozen_at_its_epoch_and_never_without_one():
    model = network()
    freeze = Freeze(model, (HEAD,), until=3)
    assert [freeze.frozen(epoch) for epoch in range(5)] == [True, True, True, False, False]
    freeze.apply(3)
    assert model.training and model[1].training
    assert all(p.requires_grad for p in model.parameters())
    assert Freeze(model, (HEAD,)).frozen(10**9)
