"""What an analytic evaluator answers, and how evaluators are found by claim id."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

PREFIX = "evaluate_"
MODULES = ("fineserve", "rooflines", "kunserve", "prism", "vtensor")


class Finding(NamedTuple):
    """Our side of a claim: a number, a word, whether a law holds, or the numbers of a list in the ledger's order; its unit; and
    from what it follows, in one sentence."""

    value: float | str | bool | tuple[float, ...]
    unit: str
    detail: str


def evaluators() -> dict[str, Callable[[], Finding]]:
    """Every analytic evaluator, by the claim id with ``_`` for ``-`` and ``.``."""
    modules = [import_module(f"fineserve_sim.experiment.analytic.{name}") for name in MODULES]
    return {
        name.removeprefix(PREFIX): function
        for module in modules
        for name, function in vars(module).items()
        if name.startswith(PREFIX)
    }
