"""What a fleet controller is told of models, and what it tells those who make its schedulers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fineserve_sim.policy.interfaces import LocalScheduler, ModelDemand


@dataclass(frozen=True, slots=True)
class FleetModel:
    """What the controller knows of a model. ``demand.weight_bytes`` is all that an engine takes on each of its GPUs beside
    KV: weights, context, activations. ``max_tokens`` is its longest sequence."""

    demand: ModelDemand
    max_tokens: int


class EngineBinding(NamedTuple):
    """A resident engine for whom a scheduler is made. ``kv_tokens`` is what its GPUs could hold for it alone, beside all
    engines that are on them now."""

    engine: int
    model: str
    gpus: tuple[int, ...]
    kv_tokens: int


SchedulerMaker = Callable[[Sequence[EngineBinding]], Mapping[tuple[int, ...], LocalScheduler | None]]
"""Local schedulers for engines whose first GPUs are the same; each key names the engines that one serves. None: nothing is
held back (see ``Route``)."""
