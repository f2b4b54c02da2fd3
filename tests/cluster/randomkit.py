"""Random clusters of every kind, small and short of everything: each is drawn from its kind and a seed, always the same.

Static clusters share GPUs, memory and schedulers; fleets have more models than memory; groups are instances of one model
that come and go, merge and split, swap and migrate. Times lie on a grid, so that much happens at the same moment, and
behind everything comes a lull and one more request: what is held in the lull has leaked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from fineserve_traces import Trace
from lawkit import Verdict, judge
from simkit import H100, Row, fixed_bytes, geometry, pinned, served, trace_of, with_kv_blocks, with_usable_bytes

from fineserve_sim import catalog
from fineserve_sim.cluster import EngineSettings, Fault, Gpu, Scenario, ServedModel
from fineserve_sim.cluster.compose.memory import resident_bytes, slots_of
from fineserve_sim.cluster.offloading import KVOffloading
from fineserve_sim.policy.placement import tp_groups
from fineserve_sim.systems import SystemSpec, load_systems
from fineserve_sim.systems.spec import ActivationSpec, PrivatePoolsSpec

Options = dict[str, Any]

FORMATS = [("llama-3.2-1b", "fp16"), ("llama-3.2-1b", "fp8"), ("llama-3.1-8b", "qoq"), ("llama-3.1-8b", "awq")]
LULL_S = 30.0
MAY_WAIT = (
    "prism",
    "qlm",
    "requeue",
    "failing",
    "drifting",
    "timetable",
    "sleeping",
    "offloading",
    "drafting",
    "tiled",
)
"""Kinds in which a model may find no room, and its requests wait for ever."""


def scenario_of(kind: str, seed: int) -> Scenario:
    """The cluster of this kind and seed; every memory checks itself at every step."""
    return replace(KINDS[kind](Random(f"{kind} {seed}")), check=True)


def judged(kind: str, seed: int) -> Verdict:
    """What the laws say to this cluster. Raises ScenarioError when it cannot be."""
    scenario = scenario_of(kind, seed)
    return judge(
        scenario,
        twin_of(kind, scenario),
        all_end=kind not in MAY_WAIT,
        timelines=kind != "still",  # those of fleets have a column a model, not an engine
    )


def twin_of(kind: str, scenario: Scenario) -> Scenario | None:
    """The static cluster that ``scenario`` must equal, if its kind has one."""
    without = {"replicas": {"dispatch": None}, "still": {"residency": None}}.get(kind)
    return replace(scenario, system=scenario.system.model_copy(update=without)) if without else None


# --- static clusters ---------------------------------------------------------------------------------------------------

PAGED = {"policy": "kvcached", "page_bytes": 2**16}
CHUNKED = {"policy": "vtensor", "chunk_bytes": 2**15}
LATE = {"policy": "moore_hodgson", "late": "drop", "clock": "now"}
PRIVATE = {"policy": "private"}
SLAB = {"policy": "kv_slab"}
STATIC: Sequence[tuple[Any, Options]] = [
    ("fcfs", SLAB),
    ("fcfs", PRIVATE | {"split": "equal"}),
    ("fcfs", PRIVATE | {"split": "equal", "prefix_cache": True}),
    ("fcfs", CHUNKED),
    ("fcfs", PAGED | {"mode": "sync"}),
    ("fcfs", {"policy": "contiguous", "max_tokens": 200}),
    ("adaptive", PRIVATE),
    ("adaptive", SLAB | {"slab_multiple": 3}),
    ({"policy": "adaptive", "when_prefilling": "union"}, SLAB),
    ("adaptive", PAGED | {"mode": "buffered"}),
    ("adaptive", CHUNKED | {"extend": "late", "trim_s": 0.02}),
    ("moore_hodgson", PRIVATE),
    ("moore_hodgson", SLAB),
    ("moore_hodgson", PAGED | {"mode": "contiguous"}),
    (LATE, SLAB),
    (LATE | {"reserve": "page"}, PRIVATE | {"split": "equal"}),
]


def static(random: Random) -> Scenario:
    """One to four models, replicated or not, on one to three GPUs that they share."""
    number = random.randint(1, 3)
    models = [
        _model(random, name, random.choice([1, 2]) if number > 1 else 1) for name in "abcd"[: random.randint(1, 4)]
    ]
    groups: dict[str, list[range]] = {}
    hosted: dict[int, list[ServedModel]] = {gpu: [] for gpu in range(number)}
    for model in models:
        candidates = [range(first, first + model.tp) for first in range(0, number - model.tp + 1, model.tp)]
        groups[model.id] = random.choices(candidates, k=random.randint(1, 2))
        for gpu in (gpu for group in groups[model.id] for gpu in group):
            hosted[gpu].append(model)
    scheduler, memory = random.choice(STATIC)
    settings = _settings(random, sequences=[2, 5, 20])
    fullest = max(hosted.values(), key=lambda here: fixed_bytes(here, settings))
    pool_bytes = random.choice([120, 200, 333, 600]) * max(geometry(m, settings).token_bytes for m in models)
    settings = with_usable_bytes(fixed_bytes(fullest, settings) + pool_bytes, settings)
    rows = _rows(random, (15, 40), 0.4, [1, 15, 16, 17, 40, 90, 150], [1, 2, 16, 30, 61, 120], len(models))
    trace = _with_prefixes(trace_of(rows, [m.id for m in models]))
    spec = _spec(placement=pinned(groups), scheduler=scheduler, memory=memory, sharing=_sharing(random, models))
    gpus = _gpus(number) if random.random() < 0.7 else _mixed(random, _gpus(number))
    return Scenario(spec, tuple(models), gpus, trace, settings, sample_s=0.05)


def _with_prefixes(trace: Trace) -> Trace:
    """Every third request begins alike, up to 40 tokens, answers included; the rest of each is its own."""
    tokens = (trace.prompt_tokens + trace.output_tokens).tolist()
    ids = [
        tuple(row % 3 * 100 + block if block < 5 else row * 1000 + block for block in range(-(-count // 8)))
        for row, count in enumerate(tokens)
    ]
    return replace(trace, prefix_hashes=tuple(ids), prefix_block_tokens=8, prefix_tokens=np.array(tokens))


# --- fleets ------------------------------------------------------------------------------------------------------------

TICKS_S = [1.0, 0.5, 0.3, 0.1]
SCHEDULERS = ["fcfs", "adaptive", "moore_hodgson"]


def prism(random: Random) -> Scenario:
    """Models that leave, come back on their first request and move."""
    residency = {
        "policy": "prism",
        "evict": random.random() < 0.8,
        "move": random.random() < 0.7,
        "idle_s": random.choice([0.5, 3.0]),
        "replace_s": random.choice([0.7, 2.0]),
        "min_stay_s": random.choice([0.0, 2.0]),
    }
    _skip(random)
    residency |= {
        "engine_pool": random.random() < 0.7,
        "parallel_loading": random.random() < 0.7,
        "engine_start_s": 4.0,
        "tick_s": random.choice(TICKS_S),
    }
    return _fleet(
        random, residency, {"policy": "kvpr", "charges": random.choice(["weights", "engine"])}, _paged(random)
    )


def _skip(random: Random) -> None:
    """Draw what is no option any more, so that a seed still is the cluster that it was."""
    random.choice((False, True))


def qlm(random: Random) -> Scenario:
    """One model at a time on a GPU; whose turn ends finishes."""
    return _fleet(random, _qlm(random, "finish"), {"policy": "dedicated"}, PRIVATE)


def requeue(random: Random) -> Scenario:
    """The same, and whose turn ends stops at once: in mid-iteration, with requests that start again elsewhere."""
    return _fleet(random, _qlm(random, "requeue"), {"policy": "dedicated"}, PRIVATE)


def drifting(random: Random) -> Scenario:
    """Models that move when that pays, some of them on GPUs that are lost."""
    residency = {
        "policy": "drifting",
        "idle_s": random.choice([0.5, 3.0]),
        "replace_s": random.choice([2.0, 5.0]),
        "horizon_s": random.choice([5.0, 600.0]),
        "engine_pool": random.random() < 0.7,
        "engine_start_s": 4.0,
        "tick_s": random.choice(TICKS_S),
    }
    scenario = _fleet(random, residency, {"policy": "balanced"}, _paged(random))
    if random.random() < 0.7:
        return scenario
    faults = _faults(random, len(scenario.gpus), span_s=8.0, repairs_s=[0.001, 1.0, 6.0])
    return replace(scenario, faults=tuple(replace(fault, what="gpu") for fault in faults))


def timetable(random: Random) -> Scenario:
    """Placements by the clock, whether their engines fit or not."""
    scenario = _fleet(random, {"policy": "prism"}, {"policy": "kvpr"}, _paged(random))
    slots, from_s = slots_of(scenario), 0.0
    entries: list[Options] = []
    while len(entries) < 4:
        groups = {}
        for model in scenario.models:
            there = tp_groups(slots, model.tp)
            chosen = random.sample(there, min(len(there), random.choice([0, 1, 1, 2])))
            groups[model.id] = tuple(chosen)
        entries.append({"from_s": from_s, "groups": groups})
        from_s += random.choice([0.5, 2.0, 5.0])
    residency = {"policy": "timetable", "entries": entries, "engine_start_s": 4.0, "tick_s": random.choice(TICKS_S)}
    system = SystemSpec.model_validate(scenario.system.model_dump() | {"residency": residency})
    return replace(scenario, system=system)


def failing(random: Random) -> Scenario:
    """Fleets of either kind whose GPUs are lost, most of them for a while."""
    scenario = random.choice([prism, qlm, requeue])(random)
    faults = _faults(random, len(scenario.gpus), span_s=8.0, repairs_s=[0.001, 1.0, 6.0])
    return replace(scenario, faults=tuple(replace(fault, what="gpu") for fault in faults))


def sleeping(random: Random) -> Scenario:
    """A fleet of another kind whose evicted engines sleep on their GPUs, which have memory for a process or three more."""
    scenario = random.choice([prism, drifting, timetable])(random)
    system, settings = scenario.system, scenario.engine
    assert isinstance(system.residency, ActivationSpec)
    sleep = {
        "host_gib": random.choice([0.0, 1.0, 3.0, 20.0, 1000.0]),
        "processes": random.choice([None, None, 1, 2]),
        "loader": random.choice(["serverlessllm", "safetensors"]),
    }
    residency = system.residency.model_dump(exclude={"engine_pool", "parallel_loading"}) | {"sleep": sleep}
    memory = (
        system.memory.model_dump() if random.random() < 0.7 else PRIVATE | {"split": random.choice(["equal", "demand"])}
    )
    system = SystemSpec.model_validate(system.model_dump() | {"residency": residency, "memory": memory})
    process_bytes = max(resident_bytes(m, settings) for m in scenario.models) // 2
    usable_bytes = int(settings.memory_utilization * H100.memory_bytes) + random.choice([0, 1, 3, 8]) * process_bytes
    scenario = replace(scenario, system=system, engine=with_usable_bytes(usable_bytes, settings))
    if scenario.faults or random.random() < 0.7:
        return scenario
    faults = _faults(random, len(scenario.gpus), span_s=8.0, repairs_s=[0.001, 1.0, 6.0])
    return replace(scenario, faults=tuple(replace(fault, what="gpu") for fault in faults))


def still(random: Random) -> Scenario:
    """A fleet in which nobody leaves and nobody moves: the static cluster of the same placement."""
    residency = {"policy": "prism", "evict": False, "move": False, "tick_s": random.choice(TICKS_S)}
    models, cards = random.randint(1, 3), random.randint(1, 2)
    settings = _settings(random)
    here = [_model(random, f"m{i}", 1, slo_s=[0.2, 2.0]) for i in range(models)]
    tokens = random.choice([3000, 8000, 30000]) * max(geometry(m, settings).token_bytes for m in here)
    settings = with_usable_bytes(fixed_bytes(here, settings) + tokens, settings)
    rows = _rows(random, (10, 40), 2.0, [1, 16, 190, 900], [1, 2, 40, 400], models)
    sharing = _sharing(random, here)
    spec = _spec(placement={"policy": "kvpr"}, memory=_paged(random), residency=residency, sharing=sharing)
    trace = trace_of(rows, [m.id for m in here])
    gpus = _gpus(cards) if random.random() < 0.7 else _mixed(random, _gpus(cards), node_gpus=1)
    return Scenario(spec, tuple(here), gpus, trace, settings, sample_s=0.5, drain_s=60.0)


def _qlm(random: Random, running: str) -> Options:
    swap_s, tick_s = random.choice([0.3, 2.0]), random.choice(TICKS_S)
    return {"policy": "qlm", "running": running, "swap_s": swap_s, "tick_s": tick_s}


def _paged(random: Random) -> Options:
    return {"policy": "kvcached", "mode": random.choice(["sync", "buffered", "contiguous"])}


def _fleet(random: Random, residency: Options, placement: Options, memory: Options) -> Scenario:
    """Up to six models, some over two GPUs, on GPUs that hold one or two of the largest and little KV."""
    cards = random.randint(1, 4)
    degrees = [1, 1, 2] if cards > 2 else [1]
    models = [
        _model(random, f"m{i}", random.choice(degrees), slo_s=[0.2, 2.0, 30.0]) for i in range(random.randint(2, 6))
    ]
    settings = _settings(random)
    largest = max(models, key=lambda m: fixed_bytes([m], settings))
    tokens = random.choice([2500, 5000, 20000]) * geometry(largest, settings).token_bytes
    settings = with_usable_bytes(fixed_bytes([largest] * random.randint(1, 2), settings) + tokens, settings)
    rows = _rows(random, (5, 60), 15.0, [1, 16, 190, 900], [1, 2, 60, 400, 900], len(models))
    scheduler = random.choice(SCHEDULERS)
    sharing = _sharing(random, models)
    spec = _spec(placement=placement, scheduler=scheduler, memory=memory, residency=residency, sharing=sharing)
    trace = trace_of(rows, [m.id for m in models])
    gpus = _gpus(cards) if random.random() < 0.7 else _mixed(random, _gpus(cards), smaller=True)
    if memory == PRIVATE and random.random() < 0.3:
        spec = spec.model_copy(update={"memory": PrivatePoolsSpec(prefix_cache=True)})
        trace = _with_prefixes(trace)
    return Scenario(spec, tuple(models), gpus, trace, settings, sample_s=0.5, drain_s=60.0)


# --- groups ------------------------------------------------------------------------------------------------------------

DISPATCH: Sequence[Options] = [
    {"policy": "round_robin"},
    {"policy": "least_loaded"},
    {"policy": "least_loaded", "queued": "head"},
    {"policy": "least_queued"},
    {"policy": "freeness"},
]


def replicas(random: Random) -> Scenario:
    """Instances alone, in turns, without faults: the static cluster of as many replicas."""
    return replace(_groups(random, "vllm-dp", {"dispatch": {"policy": "round_robin"}}, alike=True), faults=())


def instances(random: Random) -> Scenario:
    return _groups(random, "vllm-dp", {"dispatch": random.choice(DISPATCH)})


def swap(random: Random) -> Scenario:
    memory = {"policy": "swap", "host_bytes_per_s": random.choice([2e8, 2e9, 25e9])}
    return _groups(random, "infercept", {"dispatch": random.choice(DISPATCH), "memory": memory})


def llumnix(random: Random) -> Scenario:
    low, high = random.choice([(3.0, 3.0), (3.0, 30.0), (10.0, 10.0)])
    migration = {"policy": "llumnix", "out_blocks": low, "in_blocks": high}
    return _groups(random, "llumnix", {"dispatch": random.choice(DISPATCH), "migration": migration})


def roles(random: Random) -> Scenario:
    """Some instances prefill, the others decode."""
    split = _split(random)
    return _groups(random, "distserve", {"dispatch": random.choice(DISPATCH), "roles": split})


def _split(random: Random) -> Options:
    prefill, decode = random.choice([(1, 1), (1, 3), (3, 1), (2, 5)])
    split: Options = {"policy": "disaggregated", "prefill": prefill, "decode": decode}
    return split | {"setup_s": random.choice([0.0, 0.0004, 0.02]), "first_token": random.choice(["prefill", "decode"])}


def beside(random: Random) -> Scenario:
    """Several models on GPUs that they share: some prefill on one and decode on another, or on the same; some do both."""
    scenario = static(random)
    models, number, least = scenario.models, len(scenario.gpus), 2 if len(scenario.models) == 1 else 1
    groups: dict[str, list[range]] = {}
    hosted: dict[int, list[ServedModel]] = {gpu: [] for gpu in range(number)}
    for model in models:
        candidates = [range(first, first + model.tp) for first in range(0, number - model.tp + 1, model.tp)]
        groups[model.id] = random.choices(candidates, k=random.randint(least, 3))
        for gpu in (gpu for group in groups[model.id] for gpu in group):
            hosted[gpu].append(model)
    fullest = max(hosted.values(), key=lambda here: fixed_bytes(here, scenario.engine))
    pool_bytes = random.choice([300, 600, 1500]) * max(geometry(m, scenario.engine).token_bytes for m in models)
    settings = with_usable_bytes(fixed_bytes(fullest, scenario.engine) + pool_bytes, scenario.engine)
    axes: Options = {"placement": pinned(groups), "memory": PRIVATE | {"split": random.choice(["equal", "footprint"])}}
    axes |= {"dispatch": random.choice(DISPATCH), "roles": _split(random), "sharing": scenario.system.sharing}
    network = random.choice([1e8, 25e9])
    gpus = tuple(replace(gpu, node=gpu.id // 2, network_bytes_per_s=network) for gpu in _gpus(number))
    plain = replace(scenario.trace, prefix_hashes=None, prefix_block_tokens=None, prefix_tokens=None)
    return replace(scenario, system=_spec(**axes), engine=settings, trace=plain, gpus=gpus)


def pipelines(random: Random) -> Scenario:
    return _groups(random, "vllm-pp", {"execution": _execution(random, [2, 4])})


def kunserve(random: Random) -> Scenario:
    """Pipelines that form under pressure and split again; some with an instance in reserve."""
    stages = random.choice([1, 1, 1, 2])
    drop = {
        "policy": "kunserve_drop",
        "exchange": random.choice(["coordinated", "bulk"]),
        "restore": random.random() < 0.8,
        "trigger": random.choice([0.6, 0.95, 1.0]),
    }
    _skip(random)
    drop |= {
        "required": random.choice(["net", "gross"]),
        "max_group": random.choice([None, 2, 3]),
    }
    axes = {"dispatch": random.choice(DISPATCH), "execution": _execution(random, [stages]), "drop": drop}
    if stages == 1 and random.random() < 0.3:
        axes["scaling"] = {"policy": "spares", "instances": 1, "start_s": 0.05, "growing_samples": 2}
    return _groups(random, "kunserve", axes)


def _execution(random: Random, stages: Sequence[int]) -> Options:
    return {
        "policy": "pipeline",
        "stages": random.choice(stages),
        "microbatches": random.choice(["token_count", "lookahead"]),
        "lookahead": random.choice(["balanced", "literal", "direct"]),
        "queues": random.choice(["shared", "own"]),
        "min_tokens": random.choice([None, 64, 512]),
    }


def _groups(random: Random, base: str, axes: Mapping[str, Any], *, alike: bool = False) -> Scenario:
    """Four instances of one model with memory for some requests each, ``alike`` or on GPUs of several kinds; each may fail, and
    comes back."""
    spec = SystemSpec.model_validate(load_systems()[base].model_dump() | axes)
    count, tp = 4, random.choice([1, 1, 1, 2])
    model = served(fmt=random.choice(["fp16", "fp8"]), tp=tp)
    settings = EngineSettings(token_budget=256, max_sequences=random.choice([8, 256]))
    settings = with_kv_blocks([model], random.choice([60, 80, 120, 200]), settings)
    rows = _rows(random, (10, 100), random.choice([0.1, 0.5, 1.0]), [1, 16, 90, 300, 900], [1, 40, 150, 400], 1)
    network, nodes = random.choice([1e8, 25e9]), tp * random.choice([1, 2, 4])
    gpus = tuple(Gpu(gpu, gpu // nodes, H100, network) for gpu in range(count * tp))
    serving = count - (spec.scaling.instances if spec.scaling else 0)
    faults = _faults(random, serving) if random.random() < 0.5 else ()
    trace = trace_of(rows)
    keeps = spec.memory.policy == "private" and spec.migration is None and spec.roles is None
    if keeps and random.random() < 0.3:
        spec, trace = spec.model_copy(update={"memory": PrivatePoolsSpec(prefix_cache=True)}), _with_prefixes(trace)
    if not alike and random.random() < 0.4:
        gpus = _mixed(random, gpus, node_gpus=nodes)
    return Scenario(spec, (model,), gpus, trace, settings, sample_s=0.05, faults=faults)


def _faults(
    random: Random, serving: int, span_s: float = 0.6, repairs_s: Sequence[float] = (0.001, 0.05, 1.0)
) -> tuple[Fault, ...]:
    """Up to three faults; an instance that is back may be lost again, even while it loads its weights."""
    back_s = dict.fromkeys(range(serving), 0.0)
    faults = []
    for _ in range(random.randint(1, 3)):
        instance = random.randrange(serving)
        fault = Fault(back_s[instance] + random.uniform(0.001, span_s), instance, random.choice(repairs_s))
        back_s[instance] = fault.time_s + (fault.repair_s or 0.0)
        faults.append(fault)
    return tuple(faults)


SLOW = catalog.gpu("a100-80gb").model_copy(update={"memory_gib": H100.memory_gib})
"""A slower GPU with the memory of an H100."""

# --- host memory -------------------------------------------------------------------------------------------------------


def offloading(random: Random) -> Scenario:
    """A cluster of another kind whose engines keep prefixes on their GPUs, and more of them in host memory."""
    scenario = random.choice([static, static, qlm, requeue, instances])(random)
    split = random.choice(["equal", "footprint"])
    memory = PrivatePoolsSpec(prefix_cache=True, split=split)
    engine = replace(
        scenario.engine,
        kv_offloading=KVOffloading(
            random.choice([0.002, 0.01, 0.05, 1.0]),
            random.choice([None, 1e8, 2e9]),
            random.choice([0.0, 0.5]),
        ),
    )
    trace = scenario.whole_trace if random.random() < 0.3 else _with_prefixes(scenario.whole_trace)
    return replace(scenario, system=scenario.system.model_copy(update={"memory": memory}), engine=engine, trace=trace)


# --- drafts and ranks ---------------------------------------------------------------------------------------------------


def drafting(random: Random) -> Scenario:
    """A cluster of another kind with drafts before most of its models, and as much memory more as they take."""
    scenario = random.choice([static, prism, qlm, requeue, failing, instances, llumnix])(random)
    models, settings = tuple(_with_draft(random, model) for model in scenario.models), scenario.engine
    drafts_bytes = fixed_bytes(models, settings) - fixed_bytes(scenario.models, settings)
    usable_bytes = (
        int(settings.memory_utilization * H100.memory_bytes) + 2 * drafts_bytes
    )  # a GPU may have a model twice
    return replace(scenario, models=models, engine=with_usable_bytes(usable_bytes, settings))


def _with_draft(random: Random, model: ServedModel) -> ServedModel:
    tokens = random.randint(0, 3)
    accepted = random.choice([0.0, 0.6, 1.0])
    shares = [accepted**place for place in range(1, tokens + 1)]
    draft = random.choice([None, catalog.model("llama-3.2-1b")])
    return replace(model, model=catalog.with_speculation(model.model, tokens, shares, draft)) if tokens else model


def ranks(random: Random) -> Scenario:
    """Mixtures of experts whose attention runs in data-parallel ranks, each with little KV memory of its own."""
    settings = _settings(random)
    degrees = [random.choice([(2, 1), (4, 1), (2, 2)]) for _ in range(random.choice([1, 1, 2]))]
    models = tuple(_with_ranks(f"m{place}", *degree) for place, degree in enumerate(degrees))
    settings = with_kv_blocks(models[:1], random.choice([30, 60, 200]), settings)
    rows = _rows(random, (15, 60), 0.6, [1, 15, 16, 17, 90, 300], [1, 2, 16, 30, 120], len(models))
    cards = sum(count * tp for count, tp in degrees)
    spec = load_systems()["dedicated"]
    return Scenario(spec, models, _gpus(cards), trace_of(rows, [m.id for m in models]), settings, sample_s=0.05)


def _with_ranks(id: str, count: int, tp: int) -> ServedModel:
    mixture = catalog.with_experts(catalog.model("qwen3-30b-a3b"), "whole")
    return replace(served(id, tp=tp), model=catalog.with_ranks(mixture, count), precision=catalog.precision("fp16"))


def tiled(random: Random) -> Scenario:
    """A cluster of another kind on GPUs whose attention fills tiles, so few SMs that two decodes are uneven."""
    scenario = random.choice([static, prism, still, replicas, instances, llumnix, roles, pipelines, kunserve])(random)
    few = SLOW.model_copy(update={"tiling_sms": random.choice([4, 12, 40])})
    gpus = tuple(replace(gpu, spec=few) for gpu in scenario.gpus)
    return replace(scenario, gpus=gpus, engine=replace(scenario.engine, deployment="vllm-0.16"))


# --- parts -------------------------------------------------------------------------------------------------------------


def _rows(
    random: Random, number: tuple[int, int], span_s: float, prompts: list[int], outputs: list[int], models: int
) -> list[Row]:
    """Requests on a grid of a fortieth of ``span_s``, in half of the cases the first half at once; then one more."""
    grid_s, burst = span_s / 40, random.random() < 0.5
    rows = []
    for _ in range(random.randint(*number)):
        time_s = random.randint(0, 40) * grid_s
        arrival_s = 0.0 if burst and time_s < span_s / 2 else time_s
        rows.append((arrival_s, random.choice(prompts), random.choice(outputs), random.randrange(models)))
    return [*sorted(rows, key=lambda row: row[0]), (span_s + LULL_S, 16, 2, 0)]


def _model(random: Random, id: str, tp: int, slo_s: Sequence[float] = (0.02, 0.1, 0.5, 20.0)) -> ServedModel:
    slo, rate = random.choice(slo_s), random.choice([0.5, 1.0, 30.0])
    return served(id, *random.choice(FORMATS), tp=tp, slo_s=slo, rate_per_s=rate)


def _settings(random: Random, sequences: Sequence[int] = (5, 20)) -> EngineSettings:
    return EngineSettings(
        token_budget=random.choice([24, 64, 256]),
        max_sequences=random.choice(sequences),
        block_tokens=random.choice([8, 16]),
    )


def _sharing(random: Random, models: Sequence[ServedModel]) -> object:
    capped = {"mps": {random.choice(models).id: random.choice([10, 50, 90])}}
    return random.choice(["fluid", "time_slice", "mps", capped])


def _gpus(number: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(gpu, 0, H100) for gpu in range(number))


def _mixed(random: Random, gpus: Sequence[Gpu], *, node_gpus: int = 2, smaller: bool = False) -> tuple[Gpu, ...]:
    """The GPUs in nodes of ``node_gpus``, each of one kind. They host whatever an H100 does, but those of node 1 if it may be
    ``smaller``."""
    small, large, larger = (
        H100.model_copy(update={"memory_gib": H100.memory_gib * more}) for more in (0.7, 1.005, 1.5)
    )
    kinds = [H100, large, larger, catalog.gpu("h200-sxm"), SLOW]
    nodes = [random.choice([*kinds, small] if smaller and node == 1 else kinds) for node in range(len(gpus))]
    return tuple(replace(gpu, node=gpu.id // node_gpus, spec=nodes[gpu.id // node_gpus]) for gpu in gpus)


def _spec(**axes: Any) -> SystemSpec:
    sharing = axes.pop("sharing")
    chosen = {axis: {"policy": choice} if isinstance(choice, str) else choice for axis, choice in axes.items()}
    chosen["sharing"] = sharing
    named = {"name": "random", "title": "Random", "summary": "For a test", "scheduler": {"policy": "fcfs"}}
    return SystemSpec.model_validate(named | chosen)


KINDS: dict[str, Callable[[Random], Scenario]] = {
    draw.__name__: draw
    for draw in (
        static,
        prism,
        qlm,
        requeue,
        drifting,
        timetable,
        failing,
        sleeping,
        still,
        replicas,
        instances,
        swap,
        llumnix,
        roles,
        beside,
        pipelines,
        kunserve,
        offloading,
        drafting,
        ranks,
        tiled,
    )
}
