"""The byte budget of every GPU, and the KV managers of the bytes that weights leave.

    capacity = weights + activation peak + context of each engine + KV memory        (systems.md 1.2)

A private pool's share is the GPU's usable memory times the engine's part of all footprints, less the bytes that the engine
itself needs (systems.md 3). A footprint counts as at least the bytes that the engine takes, so every share holds its engine.
Other managers take all that is left, for all engines. The costs of virtual memory come from the catalog (``driver.yaml``).

SGLang's engines have a static part of the GPU, for weights and KV memory alone (``mem_fraction_static``, here
``memory_utilization``). All else lies outside of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fineserve_sim import catalog
from fineserve_sim.cluster.engine.kv import CountedBlocks, EngineKV, PrefixBlocks
from fineserve_sim.cluster.engine.links import GpuLinks
from fineserve_sim.cluster.engine.offload import OffloadedBlocks
from fineserve_sim.cluster.offloading import KVOffloading
from fineserve_sim.cluster.scenario import EngineSettings, Gpu, Scenario, ScenarioError, ServedModel
from fineserve_sim.policy.interfaces import GpuSlot, Instance, ModelDemand
from fineserve_sim.policy.memory.geometry import KVGeometry, plan_slabs
from fineserve_sim.policy.memory.host_cache import HostCache
from fineserve_sim.policy.memory.kvcached import MAX_RESERVED, MIN_RESERVED, KvCachedManager, VirtualKV
from fineserve_sim.policy.memory.ledger import MemoryLedger
from fineserve_sim.policy.memory.paged import GpuMemory, PagedPool, PrivatePools, Share, split_bytes
from fineserve_sim.policy.memory.slab import KVSlabManager
from fineserve_sim.policy.memory.vtensor import ChunkCosts, VTensorManager, tokens_per_chunk
from fineserve_sim.policy.placement.fineserve import base_footprint
from fineserve_sim.systems import spec as specs


@dataclass(frozen=True, slots=True)
class Tenant:
    """One engine on one GPU: the bytes that it needs before any KV, its KV block, the bytes of its footprint F_M, its rate."""

    engine: int
    fixed_bytes: int
    block: KVGeometry
    footprint_bytes: int
    rate_per_s: float


def usable_bytes(gpu: Gpu, settings: EngineSettings) -> int:
    return int(gpu.spec.memory_bytes * settings.memory_utilization)


def kinds_of(gpus: Iterable[Gpu]) -> dict[catalog.GpuSpec, int]:
    """The kinds of GPU that there are, numbered as they appear: policies know them by their numbers."""
    return {spec: number for number, spec in enumerate(dict.fromkeys(gpu.spec for gpu in gpus))}


def slots_of(scenario: Scenario) -> list[GpuSlot]:
    """The GPUs as placement sees them."""
    return slots_on(scenario.gpus, scenario.engine)


def slots_on(gpus: Sequence[Gpu], settings: EngineSettings) -> list[GpuSlot]:
    """The GPUs as placement sees them. Each kind within a node counts as a node, since TP groups have GPUs of one kind. Each
    slice by MIG is a node too: it forms no group."""
    kinds, nodes = kinds_of(gpus), dict[tuple[int, int, int], int]()
    of: dict[int, int] = {}
    for gpu in sorted(gpus, key=lambda gpu: (gpu.node, gpu.id)):
        together = gpu.node, kinds[gpu.spec], gpu.id if gpu.spec.whole else -1
        of[gpu.id] = nodes.setdefault(together, len(nodes))
    return [GpuSlot(gpu.id, of[gpu.id], usable_bytes(gpu, settings), kinds[gpu.spec]) for gpu in gpus]


def geometry(served: ServedModel, settings: EngineSettings) -> KVGeometry:
    """The KV cache of a model on each GPU of its TP group.

    Windows and states make KV grow unevenly. Then a token takes its part of a sequence midway through its output, of the
    lengths that the model is expected to serve. A draft model's KV is spread over the layers of the model.
    """
    model, mean_bytes = served.model, None
    if model.latent is not None or model.speculation is not None or not catalog.grows_evenly(model):
        tokens = math.ceil(served.mean_prompt_tokens + served.mean_output_tokens / 2)
        engine = model, served.precision, served.tp
        whole = catalog.kv_sequence_bytes(*engine, tokens) if tokens else catalog.kv_token_bytes(*engine)
        mean_bytes = -(-whole // (max(tokens, 1) * model.layers))
    return KVGeometry(
        mean_token_layer_bytes=mean_bytes,
        layers=served.model.layers,
        kv_heads=served.model.kv_heads,
        head_dim=served.model.head_dim,
        element_bytes=served.precision.kv_bits / 8,
        quant_bytes_per_head=served.precision.kv_quant_bytes,
        tokens_per_block=settings.block_tokens,
        tp=served.tp,
    )


def engine_block_tokens(served: ServedModel, settings: EngineSettings, memory: specs.MemorySpec) -> int:
    """Tokens of the unit in which ``memory`` gives KV to an engine of this model: its rows of chunks, its whole reservation, or
    the engine's own block. Raises ScenarioError when a chunk holds no token."""
    if isinstance(memory, specs.VTensorSpec):
        try:
            block = geometry(served, settings)
            return tokens_per_chunk(block.block_layer_bytes // block.tokens_per_block // 2, memory.chunk_bytes)
        except ValueError as error:
            raise ScenarioError(f"model {served.id}: {error}") from error
    if isinstance(memory, specs.ContiguousSpec):
        return min(served.model.max_context_tokens, memory.max_tokens or served.model.max_context_tokens)
    return settings.block_tokens


def legacy_kernel(memory: specs.MemorySpec) -> catalog.AttentionVariant | None:
    """The attention kernel that a memory policy forces upon its engines; None: today's."""
    if isinstance(memory, specs.PrivatePoolsSpec) and memory.attention != "current":
        return catalog.attention_variant(memory.attention)
    return None


def caches_prefixes(memory: specs.MemorySpec) -> bool:
    """Whether blocks of sequences that ended serve others with the same prefix."""
    return isinstance(memory, specs.PrivatePoolsSpec | specs.VTensorSpec) and memory.prefix_cache


def offloads(scenario: Scenario) -> KVOffloading | None:
    """The cache in host memory below each engine's own; None where private pools keep no prefixes. Raises ScenarioError for
    engines that are not vLLM's."""
    offloading, memory = scenario.engine.kv_offloading, scenario.system.memory
    if offloading is None or not offloading.size_gib:
        return None
    if not (isinstance(memory, specs.PrivatePoolsSpec) and memory.prefix_cache):
        return None
    if scenario.engine.batching != "vllm":
        raise ScenarioError(f"engine.kv_offloading is vLLM's; leave it out with batching {scenario.engine.batching}")
    return offloading


def copied_s(served: ServedModel, scenario: Scenario) -> float:
    """Seconds a token that copying its KV to the host adds to a step of an engine of this model."""
    offloading = offloads(scenario)
    if offloading is None:
        return 0.0
    return offloading.store_s_per_gib * geometry(served, scenario.engine).token_bytes * served.tp / 2**30


def resident_bytes(served: ServedModel, settings: EngineSettings) -> int:
    """Weights, context and, where its deployment replays them, CUDA graphs of one engine process, on each GPU."""
    return catalog.weight_bytes(served.model, served.precision, served.tp) + (
        0 if settings.static_part else _process_bytes(served, settings)
    )


def peak_activation_bytes(served: ServedModel, settings: EngineSettings) -> int:
    """Activations of a full step: the token budget, and a row of logits for every sequence that fits into it, as in vLLM."""
    return 0 if settings.static_part else _activation_bytes(served, settings)


def fixed_bytes(served: ServedModel, settings: EngineSettings) -> int:
    """Bytes that an engine needs before any KV, of the usable bytes of each of its GPUs."""
    return resident_bytes(served, settings) + peak_activation_bytes(served, settings)


def outside_bytes(served: ServedModel, settings: EngineSettings) -> int:
    """Bytes that an engine needs of each of its GPUs outside of the usable bytes; 0 where the usable bytes hold everything."""
    return _process_bytes(served, settings) + _activation_bytes(served, settings) if settings.static_part else 0


def _process_bytes(served: ServedModel, settings: EngineSettings) -> int:
    replays = catalog.deployment(settings.deployment).replays_graphs
    return settings.context_bytes + (catalog.graph_bytes(served.model, served.tp) if replays else 0)


def _activation_bytes(served: ServedModel, settings: EngineSettings) -> int:
    sampled = min(settings.max_sequences, settings.token_budget)
    logit_bytes = catalog.deployment(settings.deployment).logit_bytes
    return catalog.activation_bytes(served.model, served.tp, settings.token_budget, sampled, logit_bytes)


SGLANG_CHUNK_TOKENS = 8192
"""SGLang's prefill chunk on GPUs of 60 to 160 GiB, unless told (pull request 10975)."""


def static_fraction(memory_bytes: int, chunk_tokens: int, tp: int, ranks: int = 1) -> float:
    """The part of a GPU that SGLang 0.5 takes for weights and KV memory unless told.

    Outside lie 512 MiB, 1.5 MiB a token of a prefill chunk, and 128 MiB a GPU of the group of ``tp`` GPUs. Each sequence of
    the largest CUDA graph takes 2 MiB. Under data-parallel attention over ``ranks``, each of these sequences takes 3 MiB a
    rank more, or 4.5 MiB in graphs of over 300. Source: SGLang's rule for ``mem_fraction_static`` (pull request 10975,
    server_args), which cuts it to three digits.
    """
    graph_sequences = 256 if tp < 4 else 512
    reserved_mib = 512 + 1.5 * max(chunk_tokens, 2048) + 2 * graph_sequences + 128 * tp
    if ranks > 1:
        reserved_mib += graph_sequences * ranks * (4.5 if graph_sequences > 300 else 3)
    return round(1 - max(reserved_mib, 10 * 1024) * 2**20 / memory_bytes, 3)


def check_outside(scenario: Scenario, instances: Sequence[Instance]) -> None:
    """Raises ScenarioError where engines need more of a GPU outside of the usable bytes than there is."""
    served, settings = {model.id: model for model in scenario.models}, scenario.engine
    for gpu in scenario.gpus if settings.static_part else ():
        needed = sum(outside_bytes(served[one.model], settings) for one in instances if gpu.id in one.gpus)
        left = gpu.spec.memory_bytes - usable_bytes(gpu, settings)
        if needed > left:
            raise ScenarioError(
                f"engine.memory_utilization {settings.memory_utilization:g} leaves {left / 2**30:.1f} GiB of GPU {gpu.id} "
                f"outside of weights and KV memory; its engines need {needed / 2**30:.1f} GiB: lower it"
            )


def tenants_on(
    scenario: Scenario, instances: Sequence[Instance], demands: Mapping[str, ModelDemand]
) -> dict[int, list[Tenant]]:
    """The tenants of each GPU, one for each engine there. Engines are numbered in the order of ``instances``."""
    served, settings = {model.id: model for model in scenario.models}, scenario.engine
    tenants: dict[int, list[Tenant]] = {}
    for engine, instance in enumerate(instances):
        model = served[instance.model]
        block_tokens = engine_block_tokens(model, settings, scenario.system.memory)
        tenant = Tenant(
            engine=engine,
            fixed_bytes=fixed_bytes(model, settings),
            block=geometry(model, replace(settings, block_tokens=block_tokens)),
            footprint_bytes=charged_bytes(instance, demands, scenario.gpus),
            rate_per_s=instance.rate_per_s,
        )
        for gpu in instance.gpus:
            tenants.setdefault(gpu, []).append(tenant)
    return tenants


def claimed(
    slots: Sequence[GpuSlot], instances: Sequence[Instance], served: Mapping[str, ServedModel], settings: EngineSettings
) -> MemoryLedger:
    """The ledger of the GPUs after the claims of these engines, which are numbered 0, 1, ... in their order. Raises
    ScenarioError if they do not fit."""
    ledger = MemoryLedger.of(slots)
    for engine, instance in enumerate(instances):
        try:
            ledger.claim(engine, instance.gpus, fixed_bytes(served[instance.model], settings))
        except ValueError as error:
            raise ScenarioError(f"model {instance.model}: {error}") from error
    return ledger


def charged_bytes(instance: Instance, demands: Mapping[str, ModelDemand], gpus: Sequence[Gpu]) -> int:
    """The footprint F_M of an engine in a cluster of these GPUs."""
    if instance.footprint_bytes:
        return instance.footprint_bytes
    kinds, first = kinds_of(gpus), instance.gpus[0]
    kind = next((kinds[gpu.spec] for gpu in gpus if gpu.id == first), 0)
    return base_footprint(demands[instance.model].on(kind), len(gpus)).footprint_bytes


def build_manager(
    spec: specs.MemorySpec,
    usable: int,
    tenants: Sequence[Tenant],
    loners: Collection[int] = (),
    *,
    virtual: int | None = None,
) -> GpuMemory:
    """The KV memory of one GPU under a system's memory policy: the part of its ``usable`` bytes that these tenants leave.
    Raises ScenarioError where it cannot be built.

    ``loners`` are engines that share none of their GPUs; ``virtual`` is the most bytes that KV may ever have, by default the
    bytes that it has now.
    """
    kv_bytes = usable - sum(tenant.fixed_bytes for tenant in tenants)
    blocks = {tenant.engine: tenant.block for tenant in tenants}
    if isinstance(spec, specs.KvSlabSpec):
        return _build_slab(spec, kv_bytes, {engine: block.block_bytes for engine, block in blocks.items()}, loners)
    if isinstance(spec, specs.VTensorSpec):
        driver = catalog.driver_costs()
        return VTensorManager(
            kv_bytes,
            {engine: 2 * block.layers for engine, block in blocks.items()},
            chunk_bytes=spec.chunk_bytes,
            trim_s=spec.trim_s,
            costs=ChunkCosts(driver.create_s.value, driver.map_s.value, ahead=spec.extend == "ahead"),
        )
    if isinstance(spec, specs.KvCachedSpec):
        return _build_kvcached(spec, kv_bytes, blocks, virtual)
    pools = spec if isinstance(spec, specs.PrivatePoolsSpec) else specs.PrivatePoolsSpec()
    return _build_pools(pools, usable, kv_bytes, tenants)


Below = tuple[KVOffloading, GpuLinks]
"""A prefix cache in host memory, and the links of the GPUs whose cache it is below."""


def engine_kv(
    owner: int,
    memories: Sequence[GpuMemory],
    block_tokens: int,
    *,
    caches: bool = False,
    below: Below | None = None,
) -> EngineKV:
    """The view of engine ``owner`` on the memories of its GPUs, all of one kind. ``caches``: private pools keep prefixes."""
    pools = [memory.pool(owner) for memory in memories if isinstance(memory, PrivatePools)]
    if pools:
        return private_blocks(pools, block_tokens, caches=caches, below=below)
    return EngineKV(block_tokens, [memory for memory in memories if not isinstance(memory, PrivatePools)], owner)


def private_blocks(
    pools: Sequence[PagedPool], block_tokens: int, *, caches: bool, below: Below | None = None
) -> EngineKV:
    """The blocks of an engine in pools of its own, which together are on all its GPUs."""
    if not caches:
        return CountedBlocks(pools, block_tokens)
    if below is None:
        return PrefixBlocks(pools, block_tokens)
    offloading, links = below
    block_bytes = sum(pool.block_bytes for pool in pools)
    host = HostCache(int(offloading.size_gib * 2**30) // block_bytes)
    return OffloadedBlocks(pools, block_tokens, host, links, block_bytes)


def virtual_kv(spec: specs.KvCachedSpec, block: KVGeometry) -> VirtualKV:
    """The KV tensors of an engine with this block. A page is created and mapped in every tensor, or by one batched call where
    layers lie side by side."""
    driver, tensors = catalog.driver_costs(), 2 * block.layers
    if spec.mode == "contiguous":
        map_s = unmap_s = driver.batched_map_s.value
    else:
        map_s = tensors * (driver.create_s.value + driver.map_s.value)
        unmap_s = tensors * driver.unmap_s.value
    return VirtualKV(tensors, block.block_layer_bytes // 2, map_s, unmap_s)


def _build_slab(spec: specs.KvSlabSpec, kv_bytes: int, owners: Mapping[int, int], loners: Collection[int]) -> GpuMemory:
    plan = plan_slabs(owners.values(), cap_bytes=spec.slab_cap_bytes, multiple=spec.slab_multiple)
    first, block_bytes = next(iter(owners.items()))
    if first in loners and plan.slab_bytes == block_bytes:
        return PrivatePools({first: (block_bytes, kv_bytes)})  # the same, by counting
    return KVSlabManager(kv_bytes, owners, plan=plan)


def _build_kvcached(
    spec: specs.KvCachedSpec, kv_bytes: int, blocks: Mapping[int, KVGeometry], virtual_bytes: int | None
) -> KvCachedManager:
    buffered = spec.mode == "buffered"
    try:
        return KvCachedManager(
            kv_bytes,
            {engine: virtual_kv(spec, block) for engine, block in blocks.items()},
            page_bytes=spec.page_bytes,
            min_reserved=MIN_RESERVED if buffered else 0,
            max_reserved=MAX_RESERVED if buffered else 0,
            virtual_bytes=virtual_bytes,
        )
    except ValueError as error:  # a page may hold no block
        raise ScenarioError(str(error)) from error


def _build_pools(spec: specs.PrivatePoolsSpec, usable: int, kv_bytes: int, tenants: Sequence[Tenant]) -> PrivatePools:
    footprint_bytes = {tenant.engine: max(tenant.footprint_bytes, tenant.fixed_bytes) for tenant in tenants}
    footprints, parts, shares = sum(footprint_bytes.values()), {}, {}
    for tenant in tenants:
        block = tenant.block
        if spec.split == "footprint":
            parts[tenant.engine] = usable * footprint_bytes[tenant.engine] // footprints - tenant.fixed_bytes
        elif spec.split == "equal":
            shares[tenant.engine] = Share(1.0, 0)
        else:
            least_bytes = block.blocks_for_tokens(spec.least_tokens) * block.block_bytes
            shares[tenant.engine] = Share(tenant.rate_per_s * block.token_bytes, least_bytes)
    parts = parts or split_bytes(kv_bytes, shares)
    return PrivatePools({tenant.engine: (tenant.block.block_bytes, parts[tenant.engine]) for tenant in tenants})
