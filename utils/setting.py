"""How a setting is declared: by whoever owns it, for utils/settings/config.py to read."""

import dataclasses


def setting(
    default,
    help: str,
    *,
    group: str,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    choices=None,
    or_own: bool = False,
    unit: str = "",
    default_text: str = "",
    bare=None,
    resume: str = "fixed",
    before=None,
    many: bool = False,
    essential: bool = False,
):
    """A dataclass field that is a setting.

    Args:
        default: its value when nobody sets it; None where that depends on other settings.
        help: one sentence for `--help`.
        group: the heading under which `--help` lists it.
        low, above, high, below: the range, with and without its ends.
        choices: the values allowed, or a function that returns them.
        or_own: FILE.py:NAME is allowed, too.
        unit: for `--help`: steps, pixels, ...
        default_text: for `--help` where `default` is None.
        bare: the value of the flag given without one; None where a value is needed.
        resume: "fixed" if a resumed run must keep it, "free" if it may be changed, "evaluation"
            if it may be changed where nothing is trained.
        before: its value in runs that were started before the setting was introduced, if that is
            not what `default` stands for.
        many: a str of values separated by commas; the flag also takes them one by one.
        essential: where it would have no effect the run is refused, since it would train on other
            data, or lack a file, than was asked for. Flags of the model (group "model") are refused
            likewise; all others are left out with a line (see `parse`).
    """
    return dataclasses.field(default=default, metadata=locals() | {"setting": True})
