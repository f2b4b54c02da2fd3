"""The TP degrees that a model may have: the one that the file says, or for ``auto`` all at which a group of GPUs holds it."""

from __future__ import annotations

from fineserve_sim.catalog import check_tp, weight_bytes
from fineserve_sim.cluster.compose.memory import usable_bytes
from fineserve_sim.experiment.file.resolve import ResolvedModel, Setup
from fineserve_sim.policy.interfaces import GpuSlot
from fineserve_sim.policy.placement.tp_groups import tp_groups

AUTO = "auto"
DEGREES = (1, 2, 4, 8)
"""Those that FineServe's own implementation tries."""


def groups_by_degree(setup: Setup, model: ResolvedModel) -> dict[int, int]:
    """How many groups of GPUs there are of each degree, rising, over which the model splits and whose GPUs hold its weights.
    Slices by MIG form no groups."""
    slots = [GpuSlot(gpu.id, gpu.node, usable_bytes(gpu, setup.engine)) for gpu in setup.gpus]
    most = 1 if any(gpu.spec.whole for gpu in setup.gpus) else max(DEGREES)
    left_bytes = max(slot.memory_bytes for slot in slots) - setup.engine.context_bytes
    fitting = [tp for tp in DEGREES if tp <= most and _splits(model, tp)]
    fitting = [tp for tp in fitting if weight_bytes(model.spec, model.precision, tp) < left_bytes]
    return {tp: groups for tp in fitting if (groups := len(tp_groups(slots, tp)))}


def least_degree(setup: Setup, model: ResolvedModel) -> int:
    """That of the file, or the smallest at which it fits: how a model runs that has GPUs of its own. 1 if it fits nowhere."""
    tp = model.entry.tp
    return tp if isinstance(tp, int) else min(groups_by_degree(setup, model), default=1)


def _splits(model: ResolvedModel, tp: int) -> bool:
    try:
        check_tp(model.spec, tp)
    except ValueError:
        return False
    return True
