"""The optimizers of the table that have code of their own: all but Apex's names, which are adamw,
lamb and sgd where there is no Apex (tests/optim/test_apex.py)."""

from utils.optim.apex import ApexEntry
from utils.optim.table import OPTIMIZERS

OWN = [name for name, entry in OPTIMIZERS.items() if not isinstance(entry, ApexEntry)]
