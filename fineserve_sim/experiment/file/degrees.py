"""The TP degrees that a model may have: the one that the file says, or for ``auto`` all at which a group of GPUs holds it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fineserve_sim.catalog import check_tp
from fineserve_sim.cluster import ServedModel
from fineserve_sim.cluster.compose.memory import fixed_bytes, slots_on
from fineserve_sim.experiment.file.resolve import ResolvedModel, Setup
from fineserve_sim.policy.interfaces import GpuSlot
from fineserve_sim.policy.placement import tp_groups

AUTO = "auto"
DEGREES = (1, 2, 4, 8)
"""Those that FineServe's own implementation tries."""


def slots_of(setup: Setup) -> list[GpuSlot]:
    """The GPUs as placements see them."""
    return slots_on(setup.gpus, setup.engine)


def groups_by_degree(setup: Setup, model: ResolvedModel) -> dict[int, int]:
    """How many groups of GPUs there are of each degree, rising, over which the model splits and on whose GPUs an engine of it
    has memory for KV left. Slices by MIG form no groups."""
    slots = slots_of(setup)
    most = 1 if any(gpu.spec.whole for gpu in setup.gpus) else max(DEGREES)
    largest_bytes = max(slot.memory_bytes for slot in slots)
    splitting = [tp for tp in splitting_degrees(model) if tp <= most]
    fitting = [tp for tp in splitting if _fixed_bytes(setup, model, tp) < largest_bytes]
    return {tp: groups for tp in fitting if (groups := len(tp_groups(slots, tp)))}


def splitting_degrees(model: ResolvedModel) -> list[int]:
    """The degrees over which the model splits, rising."""
    return [tp for tp in DEGREES if _splits(model, tp)]


def least_degree(setup: Setup, model: ResolvedModel) -> int:
    """The degree in the file, or the smallest at which the model fits: for a model that has GPUs of its own. 1 if it fits
    nowhere."""
    tp = model.entry.tp
    return tp if isinstance(tp, int) else min(groups_by_degree(setup, model), default=1)


def pinned_degree(setup: Setup, model: ResolvedModel, groups: Sequence[Sequence[int]]) -> int:
    """How many GPUs each of the ``groups`` must have that a model is pinned to: an open degree is the first one's."""
    open_degree = len(groups[0]) if groups and model.entry.tp == AUTO else 0
    return open_degree if open_degree in groups_by_degree(setup, model) else least_degree(setup, model)


def _fixed_bytes(setup: Setup, model: ResolvedModel, tp: int) -> int:
    served = ServedModel(model.id, model.spec, model.precision, tp, 0.0, math.inf, 0.0, 0.0)
    return fixed_bytes(served, setup.engine)


def _splits(model: ResolvedModel, tp: int) -> bool:
    try:
        check_tp(model.spec, tp)
    except ValueError:
        return False
    return True
