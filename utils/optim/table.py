"""The table of optimizers. To add one, write its file in this folder, with an `OptimizerEntry`
(entry.py), and name it in a line here; tests/worked_example/ has an example."""

import functools

from ..place import resolve
from .entry import MATRICES, OptimizerEntry
from .own import make as make_own

PLACES = {
    "sgd": "utils.optim.sgd:SGD",
    "adamw": "utils.optim.adamw:ADAMW",
    "lamb": "utils.optim.lamb:LAMB",
    "muon": "utils.optim.muon:MUON",
    "madgrad": "utils.optim.madgrad:MADGRAD",
    "ngd": "utils.optim.ngd.entry:NGD_ENTRY",
    "fusedadam": "utils.optim.apex:FUSED_ADAM",
    "fusedlamb": "utils.optim.apex:FUSED_LAMB",
    "fusedsgd": "utils.optim.apex:FUSED_SGD",
    "fusednovograd": "utils.optim.novograd:FUSED_NOVOGRAD",
}


class Table(dict[str, OptimizerEntry]):
    """Also has those that FILE.py:NAME names, but does not list them."""

    def __missing__(self, name: str) -> OptimizerEntry:
        if ":" not in name:
            raise KeyError(name)
        own = functools.partial(make_own, name)
        needs = MATRICES  # perhaps
        return OptimizerEntry(summary="your own", make=own, lr=None, weight_decay=0.0, needs=needs)


OPTIMIZERS = Table({name: resolve(place) for name, place in PLACES.items()})
