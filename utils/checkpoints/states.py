"""The states of an optimizer and of the random generators, as checkpoints hold them: tensors under
the names of parameters, and JSON."""

import base64
import hashlib
import itertools

import torch
from torch import Tensor

from ..errors import UserError
from ..exchange import Exchange
from ..optim.table import OPTIMIZERS
from .shards import is_by_element

# Keys of a parameter group that change with the steps: the last learning rate (the schedule sets
# the next), and counts of steps.
OF_THE_STEPS = (
    *("lr", "lookahead_step"),
    *(key for entry in OPTIMIZERS.values() for key in entry.group_state),
)


def optimizer_tensors(optimizer, names: dict[Tensor, str]) -> tuple[dict[str, Tensor], dict]:
    """The optimizer's state: tensors under canonical names, and all else as JSON.

    Args:
        names: {parameter: its canonical name}.
    Returns:
        ({"<parameter>/<key>": tensor}, {"groups": [...], "values": {"<parameter>/<key>": number}})
    """
    saved = optimizer.state_dict()  # refers to parameters by number
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    own = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    name_of = dict(zip(numbers, own, strict=True))
    tensors, values = {}, {}
    for number, state in saved["state"].items():
        for key, value in state.items():
            target = tensors if isinstance(value, Tensor) else values
            target[f"{name_of[number]}/{key}"] = value
    groups = [
        {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items()}  # a count of steps
        | {"params": [name_of[number] for number in group["params"]]}
        for group in saved["param_groups"]
    ]
    return tensors, {"groups": groups, "values": values}


@torch.no_grad()
def restore_optimizer(
    optimizer,
    names: dict[Tensor, str],
    tensors: dict[str, Tensor],
    rest: dict,
    exchange: Exchange | None = None,
) -> None:
    """The inverse of `optimizer_tensors`: loads the state into an optimizer of the same parameters.
    The settings of its groups stay as they are. They may be divided into other groups, as where
    --lr has become equal to --head_lr.

    State of its parameter's shape gets the parameter's memory format, as the optimizer would have
    created it; for a sharded parameter (see shards.py) this rank takes its rows.

    Args:
        tensors: whole ones.
        exchange: with the other ranks, if parameters are sharded.

    Raises:
        UserError: the parameters are not those of the checkpoint, or those of a group have taken
            different numbers of steps.
    """
    exchange = exchange or Exchange()
    parameters = {name: parameter for parameter, name in names.items()}
    kept_of = {
        name: {key: saved[key] for key in OF_THE_STEPS if key in saved}
        for saved in rest["groups"]
        for name in saved["params"]
    }
    own = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    number_of = {name: number for number, name in enumerate(itertools.chain(*own))}
    if number_of.keys() != kept_of.keys():
        raise UserError("the checkpoint's optimizer has other parameters than this run's")
    groups = []
    for group, members in zip(optimizer.param_groups, own, strict=True):
        kept = kept_of[members[0]] if members else {}  # the first group may be empty
        if any(kept_of[name] | {"lr": None} != kept | {"lr": None} for name in members):
            raise UserError("the checkpoint's optimizer has other groups than this run's")
        groups.append(group | kept | {"params": [number_of[name] for name in members]})
    state: dict[int, dict] = {}
    for key, value in [*tensors.items(), *rest["values"].items()]:
        name, _, entry = key.rpartition("/")
        parameter = parameters[name]
        if isinstance(value, Tensor):
            if is_by_element(entry, value, exchange.shape(parameter)):
                part = exchange.part(parameter, value)
                value = torch.empty_like(parameter, dtype=value.dtype).copy_(part)
            else:
                value = value.clone()  # the checkpoint's must not change
        state.setdefault(number_of[name], {})[entry] = value
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def random_states() -> dict[str, str]:
    """Returns the states of PyTorch's generators in this process, for JSON. From these draw the
    weights at the start, dropout and stochastic depth; order and augmentation follow from seed,
    epoch and step."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {
        name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()
    }


def restore_random_states(states: list[dict] | dict, rank: int = 0, step: int = 0) -> None:
    """Restores this rank's entry. A rank without one is seeded by a hash of the seed of the
    last torch.manual_seed, the step and its rank.

    Args:
        states: what `random_states` returned on each rank; a dict: of a single process (from older
            checkpoints).
        step: at which they were saved.
    """
    if isinstance(states, dict):
        states = [states]
    if rank >= len(states):
        name = f"{torch.initial_seed()}/{step}/{rank}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]))
        return
    restored = {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        for name, text in states[rank].items()
    }
    torch.set_rng_state(restored["cpu"])
    if "cuda" in restored and torch.cuda.is_available():
        torch.cuda.set_rng_state(restored["cuda"])
