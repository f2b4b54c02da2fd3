"""The byte budget of every GPU, and the KV managers that fill what the weights leave.

    capacity = weights + activation peak + context of each engine + KV memory        (systems.md 1.2)

A private pool's share is the GPU's usable memory times the model's part of all footprints, less what the model itself needs; a
slab manager takes all that is left, for everybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fineserve_sim.catalog import activation_bytes, weight_bytes
from fineserve_sim.cluster.scenario import EngineSettings, Gpu, ServedModel
from fineserve_sim.policy.geometry import KVGeometry
from fineserve_sim.policy.interfaces import Instance, KVManager
from fineserve_sim.policy.paged import PrivatePools
from fineserve_sim.policy.slab import KVSlabManager, plan_slabs
from fineserve_sim.systems.spec import KvSlabSpec, MemorySpec, PrivatePoolsSpec


@dataclass(frozen=True, slots=True)
class Tenant:
    """One engine on one GPU, in bytes: what it needs before any KV, its KV block, and its footprint F_M."""

    engine: int
    fixed_bytes: int
    block_bytes: int
    footprint_bytes: int


def usable_bytes(gpu: Gpu, settings: EngineSettings) -> int:
    return int(gpu.spec.memory_bytes * settings.memory_utilization)


def geometry(served: ServedModel, settings: EngineSettings) -> KVGeometry:
    """The KV cache of a model on each GPU of its TP group."""
    return KVGeometry(
        layers=served.model.layers,
        kv_heads=served.model.kv_heads,
        head_dim=served.model.head_dim,
        element_bytes=served.precision.kv_bits / 8,
        quant_bytes_per_head=served.precision.kv_quant_bytes,
        tokens_per_block=settings.block_tokens,
        tp=served.tp,
    )


def resident_bytes(served: ServedModel, settings: EngineSettings) -> int:
    """Weights and the context of one engine process, on each GPU."""
    return weight_bytes(served.model, served.precision, served.tp) + settings.context_bytes


def peak_activation_bytes(served: ServedModel, settings: EngineSettings) -> int:
    """Activations of a full step: the token budget, and a row of logits for every sequence."""
    sampled = min(settings.max_sequences, settings.token_budget)
    return activation_bytes(served.model, served.tp, settings.token_budget, sampled)


def tenants_by_gpu(
    instances: Sequence[Instance],
    served: Mapping[str, ServedModel],
    footprints: Mapping[str, int],
    settings: EngineSettings,
) -> dict[int, list[Tenant]]:
    """Who lives on which GPU; engines are numbered in the order of ``instances``."""
    tenants: dict[int, list[Tenant]] = {}
    for engine, instance in enumerate(instances):
        model = served[instance.model]
        tenant = Tenant(
            engine=engine,
            fixed_bytes=resident_bytes(model, settings) + peak_activation_bytes(model, settings),
            block_bytes=geometry(model, settings).block_bytes,
            footprint_bytes=instance.footprint_bytes or footprints[instance.model],
        )
        for gpu in instance.gpus:
            tenants.setdefault(gpu, []).append(tenant)
    return tenants


def build_manager(spec: MemorySpec, usable: int, tenants: Sequence[Tenant]) -> KVManager:
    """The KV memory of one GPU with ``usable`` bytes under a system's memory policy."""
    if isinstance(spec, KvSlabSpec):
        kv_bytes = max(0, usable - sum(tenant.fixed_bytes for tenant in tenants))
        owners = {tenant.engine: tenant.block_bytes for tenant in tenants}
        plan = plan_slabs(owners.values(), cap_bytes=spec.slab_cap_bytes, multiple=spec.slab_multiple)
        reserved = min(spec.reserved_slabs, kv_bytes // plan.slab_bytes)
        return KVSlabManager(kv_bytes, owners, plan=plan, reserved_slabs=reserved)
    return PrivatePools(_shares(spec, usable, tenants))


def _shares(spec: PrivatePoolsSpec, usable: int, tenants: Sequence[Tenant]) -> dict[int, tuple[int, int]]:
    """(block bytes, KV bytes) of each engine. A share that does not even hold the model leaves it no KV memory."""
    if spec.split == "equal":
        each = max(0, usable - sum(tenant.fixed_bytes for tenant in tenants)) // len(tenants)
        return {tenant.engine: (tenant.block_bytes, each) for tenant in tenants}
    footprints = sum(tenant.footprint_bytes for tenant in tenants)
    return {
        tenant.engine: (
            tenant.block_bytes,
            max(0, usable * tenant.footprint_bytes // footprints - tenant.fixed_bytes),
        )
        for tenant in tenants
    }
