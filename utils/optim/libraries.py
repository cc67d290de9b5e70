"""timm's optimizers, made to honour `found_inf`. timm is imported when one is made.

They create their state at the first step, which therefore takes longer.
"""

from __future__ import annotations

import functools


@functools.cache
def of_timm(name: str) -> type:
    """timm's optimizer class of this name, with `found_inf`."""
    import timm.optim

    from utils.optim.found_inf import HonoursFoundInf

    return type(name, (HonoursFoundInf, getattr(timm.optim, name)), {})


def __getattr__(name: str) -> type:
    """The classes by name, as pickle looks them up."""
    if not name.startswith("_"):
        import timm.optim

        if isinstance(getattr(timm.optim, name, None), type):
            return of_timm(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
