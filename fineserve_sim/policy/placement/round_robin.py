"""Placement in turn: what an operator does by hand, and the start of Prism without its global scheduler (PR-10-global)."""

from __future__ import annotations

from collections.abc import Sequence

from fineserve_sim.policy.interfaces import GpuSlot, Instance, ModelDemand, Placement
from fineserve_sim.policy.placement.tp_groups import tp_groups


class RoundRobinPlacement:
    """Models by falling weights of all their parts, each to the next GPU or TP group in turn. A group that does not hold
    the engine, with at least a byte left for KV, is passed over; models that fit nowhere are unplaced. Ties: lower id."""

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        left_bytes = {gpu.id: gpu.memory_bytes for gpu in gpus}
        turns: dict[int, int] = {}
        instances = []
        for model in sorted(models, key=lambda model: (-model.weight_bytes * model.tp, model.id)):
            groups = tp_groups(gpus, model.tp)
            turn = turns.get(model.tp, 0)
            for offset in range(len(groups)):
                group = groups[(turn + offset) % len(groups)]
                if all(left_bytes[gpu] > model.engine_bytes for gpu in group):
                    turns[model.tp] = turn + offset + 1
                    for gpu in group:
                        left_bytes[gpu] -= model.engine_bytes
                    instances.append(Instance(model.id, 0, group, model.rate_per_s, model.weight_bytes))
                    break
        placed = {instance.model for instance in instances}
        return Placement(tuple(instances), tuple(model.id for model in models if model.id not in placed))
