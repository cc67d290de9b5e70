"""The table of engines, and which of them serves a run.

This module imports PyTorch only when it makes an engine.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

from utils.errors import UserError

if TYPE_CHECKING:
    from utils.engines.engine import Engine, RunFacts

ENGINES = {
    "eager": "utils.engines.engine:Engine",
    "compile": "utils.engines.engine:Compile",
    "cuda_graphs": "utils.engines.cuda_graphs:CudaGraphs",
    "ort": "utils.engines.ort.module:Ort",
}


def choose_engine(
    facts: RunFacts, *, engine: str = "torch", cuda_graphs: str, deterministic: bool
) -> tuple[Engine, list[str]]:
    """The engine that serves a run, and a line for each engine that was asked for and cannot.

    Args:
        engine: "torch": one of PyTorch's, by the other arguments; else a name in ENGINES.
        cuda_graphs: "on": used if possible, else a line says why not; "auto": used only where they
            save time, else no line; "off".
        deterministic: two runs must use graphs for the same steps, so "auto" does not use any.

    Raises:
        UserError: `engine` cannot serve the run.
    """
    if engine != "torch":
        chosen = pkgutil.resolve_name(ENGINES[engine])(True)
        if (reason := chosen.why_not(facts)) is not None:
            raise UserError(f"--engine {engine}: {reason}")
        return chosen, []
    notes = []
    for name, asked in _wanted(facts.compiled, cuda_graphs, deterministic):
        chosen = pkgutil.resolve_name(ENGINES[name])(asked)
        reason = chosen.why_not(facts)
        if reason is None:
            return chosen, notes
        if asked:
            notes.append(f"--{name}: not used, because {reason}")
    raise AssertionError("the last engine serves any run")


def _wanted(compiled: bool, cuda_graphs: str, deterministic: bool) -> list[tuple[str, bool]]:
    """(engine, whether the user has asked for it), in the order in which they are tried."""
    wanted = []
    if cuda_graphs == "on" or (cuda_graphs == "auto" and not deterministic):
        wanted.append(("cuda_graphs", cuda_graphs == "on"))
    wanted.append(("compile", True) if compiled else ("eager", False))
    return wanted
