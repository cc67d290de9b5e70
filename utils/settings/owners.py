"""Which entry script has a flag that another one does not know."""

import importlib

from utils.errors import UnknownFlag
from utils.settings.config import fields
from utils.settings.values import canonical_name

# Modules with the settings of an entry, whose flags a message may name.
ENTRIES = ("resnet50_test", "vit_test", "transformer_test")


def with_owners(error: UnknownFlag) -> UnknownFlag:
    """Names the entries that have the flag, if there are any."""
    name, owners = canonical_name(error.flag), []
    for entry in ENTRIES:
        try:
            owner = importlib.import_module(entry)
        except ImportError:  # an entry that was copied elsewhere
            continue
        if name in fields(owner.Settings):
            owners.append(f"{entry}.py")
    return UnknownFlag(error.flag, f": it belongs to {' and '.join(owners)}") if owners else error
