"""What decides a claim: a function, found by the claim's id.

    @claim("KS-2-events", needs=("kunserve_fig02",))
    def events(results: Results) -> Evaluation: ...

A function that needs experiments reads their results; one that needs none takes nothing. Claims that experiment files state
themselves (``declared``) and those that the calibrator answers (``calibrator``) become deciders of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from fineserve_sim.experiment.reproduce.finished import Results
from fineserve_sim.experiment.reproduce.judge import Evaluation


@dataclass(frozen=True, slots=True)
class Decider:
    """What decides a claim, and the experiments, by name, whose results it reads. ``by``: what the ledger calls it."""

    decide: Callable[[Results], Evaluation]
    needs: tuple[str, ...]
    by: str


Evaluator = TypeVar("Evaluator", bound=Callable[..., Evaluation])

_registered: dict[str, Decider] = {}
REGISTERED: Mapping[str, Decider] = MappingProxyType(_registered)
"""All deciders so far, by the ids of their claims; ``papers`` registers them."""


def claim(name: str, *, needs: tuple[str, ...] = (), by: str = "") -> Callable[[Evaluator], Evaluator]:
    """Register the decorated function as what decides the claim ``name``. ``by``: its experiments, unless said, or analysis.

    Raises ValueError where a claim has a decider already.
    """

    def register(evaluate: Evaluator) -> Evaluator:
        if name in _registered:
            raise ValueError(f"claim {name} is decided by two functions")
        decide = evaluate if needs else lambda _: evaluate()
        _registered[name] = Decider(decide, needs, by or ", ".join(needs) or "analysis")
        return evaluate

    return register
