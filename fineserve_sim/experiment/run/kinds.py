"""The GPUs on which a model is by itself, where a cluster has several kinds: for base limits, and for what clients ask."""

from __future__ import annotations

from fineserve_sim.cluster import Gpu, ServedModel
from fineserve_sim.cluster.compose.memory import fixed_bytes, kinds_of, slots_on
from fineserve_sim.cluster.compose.profiling import fastest
from fineserve_sim.experiment.file.resolve import Setup
from fineserve_sim.policy.memory.ledger import MemoryLedger
from fineserve_sim.policy.placement import tp_groups


def own_gpus(setup: Setup, model: ServedModel) -> tuple[Gpu, ...]:
    """All GPUs of one kind: of the kinds that hold the model, the one on which its engine serves the most. So what a model is
    by itself depends neither on the order of the file nor on slower GPUs. The first ones form a TP group. All GPUs of the
    cluster where no kind holds the model."""
    gpus, engine = setup.gpus, setup.engine
    if len(kinds_of(gpus)) == 1:
        return gpus
    ledger = MemoryLedger.of(slots := slots_on(gpus, engine))
    groups = [
        group
        for group in tp_groups(slots, model.tp * model.ranks)
        if ledger.has_room(group, fixed_bytes(model, engine))
    ]
    if not groups:
        return gpus
    spec_of = {gpu.id: gpu.spec for gpu in gpus}
    kind = fastest(model, [spec_of[group[0]] for group in groups], engine)
    first = next(group for group in groups if spec_of[group[0]] == kind)
    return tuple(sorted((gpu for gpu in gpus if gpu.spec == kind), key=lambda gpu: (gpu.id not in first, gpu.id)))
