"""Where a run with local steps stands in its rounds, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...plural import counted


@dataclass
class Rounds:
    """Where a run with local steps stands in its rounds."""

    averagings: int = 0  # so far
    # By them, in units of what DDP sends in a step: 1 for each, and more if optimizer state is
    # averaged, too.
    sent: float = 0.0
    length: int = 0  # H of this round; between two rounds, of the last one; 0: none has begun
    end: int | None = None  # the step that ends this round; None: the next step begins a round
    first_step: int = 0  # of the run with local steps; not 0 if it began with another strategy
    equal: bool = True  # all workers have the same parameters

    def sent_of_ddp(self, step: int) -> float:
        """What was sent until `step`, relative to DDP in as many steps."""
        return self.sent / max(1, step - self.first_step)


def averagings_text(averagings: int, steps: int, sent_of_ddp: float) -> str:
    share = f"{100 * sent_of_ddp:.1f} % of DDP's bytes"
    return f"{counted(averagings, 'averaging')} in {counted(steps, 'step')}: {share}"


def lengths_text(lengths: Sequence[int]) -> str:
    """ "H 4 to 30, the last round cut to 2"."""
    *others, last = lengths
    is_cut = bool(others) and last < min(others)  # the run ends before the round would
    whole = others if is_cut else lengths
    least, most = min(whole), max(whole)
    text = f"H {least:,}" if least == most else f"H {least:,} to {most:,}"
    return f"{text}, the last round cut to {last:,}" if is_cut else text


def amount_text(count: float) -> str:
    return f"{count / 1e9:,.3g} GB" if count >= 1e9 else f"{count / 1e6:,.3g} MB"
