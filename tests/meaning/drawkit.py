"""Small clusters of every shipped system, drawn choice by choice from a ``Random``: Hypothesis gives one that it can shrink.

Memory is tight or roomy, GPUs are shared or not, instances span one or two GPUs. What a system takes out of memory at once
(a page, a chunk, a longest sequence) is made small, as are its times, so that little work is enough to fill a memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import randomkit
from fineserve_traces import Trace
from simkit import H100, Row, fixed_bytes, geometry, pinned, served, trace_of, with_usable_bytes

from fineserve_sim import catalog
from fineserve_sim.cluster import EngineSettings, Gpu, Scenario, ServedModel
from fineserve_sim.systems import SystemSpec, load_systems

SYSTEMS = load_systems()
GROUPS = tuple(name for name, spec in SYSTEMS.items() if spec.dispatch is not None)
FLEETS = tuple(name for name, spec in SYSTEMS.items() if spec.residency is not None)
BOUNDS = tuple(name for name, spec in SYSTEMS.items() if spec.scheduler.policy == "clairvoyant")
STATIC = tuple(name for name in SYSTEMS if name not in GROUPS + FLEETS + BOUNDS)
ALONE = tuple(name for name in STATIC if SYSTEMS[name].placement.policy == "dedicated")
"""Static systems in which no two models share a GPU."""
FCFS = tuple(name for name in STATIC + GROUPS if SYSTEMS[name].scheduler.policy == "fcfs")

SMALL: Mapping[str, Mapping[str, object]] = {
    "vtensor": {"chunk_bytes": 2**15},
    "kvcached": {"page_bytes": 2**16},
    "contiguous": {"max_tokens": 400},
    "prism": {"idle_s": 3.0, "replace_s": 2.0, "min_stay_s": 2.0, "engine_start_s": 4.0},
    "qlm": {"swap_s": 2.0},
}
"""Options by policy: what they are in small."""

PROMPTS = [1, 16, 90, 300, 900]
OUTPUTS = [1, 2, 40, 150, 400]
CALM_S = 10.0
"""Longer than any one of these requests takes on an engine alone."""
KV_TOKENS = [200, 450, 1000, 2500, 20_000]


def system(name: str, **axes: object) -> SystemSpec:
    """A shipped system in small, some axes replaced by specs or, a mapping, some of their options."""
    spec = SYSTEMS[name]
    changed: dict[str, Any] = {}
    for axis in ("memory", "residency"):
        policy = getattr(spec, axis)
        if policy is not None and policy.policy in SMALL:
            changed[axis] = policy.model_copy(update=dict(SMALL[policy.policy]))
    spec = spec.model_copy(update=changed)
    if axes:
        options = {
            axis: getattr(spec, axis).model_dump() | value
            if isinstance(value, dict) and "policy" not in value
            else value
            for axis, value in axes.items()
        }
        spec = SystemSpec.model_validate(spec.model_dump() | options)
    return spec


def model(random: Random, id: str, tp: int = 1, kind: tuple[str, str] | None = None) -> ServedModel:
    """One of a few small models, at a rate that no other id has."""
    rate = random.choice([0.5, 1.0, 30.0]) * (1 + ord(id[-1]) / 1000)
    name, fmt = kind or random.choice(randomkit.FORMATS)
    return served(id, name, fmt, tp=tp, slo_s=random.choice([0.05, 0.5, 20.0]), rate_per_s=rate)


def settings(random: Random) -> EngineSettings:
    return replace(randomkit._settings(random, sequences=[3, 20, 256]), latency=random.choice(["tables", "roofline"]))


def with_kv_tokens(models: Sequence[ServedModel], tokens: int, settings: EngineSettings) -> EngineSettings:
    """A GPU that hosts an engine of each of ``models`` has KV memory for so many tokens of the model with the largest ones."""
    token_bytes = max(geometry(model, settings).token_bytes for model in models)
    return with_usable_bytes(fixed_bytes(models, settings) + tokens * token_bytes, settings)


def engines_gpus(name: str, tp: int) -> int:
    """GPUs of the smallest engine of a system: static pipelines have two stages, and a role each has an engine."""
    execution = SYSTEMS[name].execution
    return tp * (1 if execution is None else execution.stages) * (1 if SYSTEMS[name].roles is None else 2)


def lone(random: Random, name: str, rows: Sequence[Row] | Trace, tokens: int | None = None, **axes: object) -> Scenario:
    """One engine of one model with all GPUs for itself, and KV memory for ``tokens`` (drawn, if not given)."""
    one = model(random, "m", random.choice([1, 1, 2]))
    chosen = settings(random)
    chosen = with_kv_tokens([one], tokens or random.choice(KV_TOKENS), chosen)
    trace = rows if isinstance(rows, Trace) else trace_of(rows)
    gpus = randomkit._gpus(engines_gpus(name, one.tp))
    spec = system(name, **axes)
    if name not in GROUPS + FLEETS:  # what a placement measures costs more than the run
        spec = on_gpus(spec, {one.id: [range(one.tp)]})
    return Scenario(spec, (one,), gpus, trace, chosen, sample_s=0)


def calm_rows(random: Random, models: int = 1) -> list[Row]:
    """Requests so far apart that each has the cluster to itself."""
    return [
        (CALM_S * number, random.choice(PROMPTS), random.choice(OUTPUTS), random.randrange(models))
        for number in range(random.randint(1, 5))
    ]


def crowd_rows(random: Random, models: int = 1, span_s: float = 1.0, prompts: Sequence[int] = PROMPTS) -> list[Row]:
    """Requests that meet; with ``span_s`` of 0 they come all at once."""
    if span_s:
        return randomkit._rows(random, (2, 14), span_s, [*prompts], OUTPUTS, models)
    number = random.randint(2, 12)
    return [(0.0, random.choice(prompts), random.choice(OUTPUTS), random.randrange(models)) for _ in range(number)]


def cluster(random: Random, name: str, *, differ: bool = False, **options: Any) -> Scenario:
    """Up to four models, or two to four instances of one, on up to four GPUs where the system itself puts them. Models may be
    alike unless they are to ``differ``."""
    if name in GROUPS:
        return _instances(random, name, **options)
    spec, chosen = system(name), settings(random)
    number = random.randint(1, 4)
    alone = spec.placement.policy == "dedicated" and name not in FLEETS
    cards = random.randint(1, 4)
    models, left = [], cards
    kinds = random.sample(randomkit.FORMATS, number) if differ else [None] * number
    for id, kind in zip("abcd", kinds, strict=False):
        tp = random.choice([1, 1, 2]) if min(left, cards) > 1 else 1
        if alone and left < tp:
            break
        left -= tp if alone else 0
        models.append(model(random, id, tp, kind))
    largest = max(models, key=lambda one: fixed_bytes([one], chosen))
    together = [largest] * (1 if alone else random.randint(1, len(models)))
    tokens = random.choice(KV_TOKENS)
    chosen = with_kv_tokens(together, tokens, chosen)
    span_s = random.choice([1.0, 15.0]) if name in FLEETS else random.choice([0.4, 2.0])
    trace = trace_of(crowd_rows(random, len(models), span_s, _prompts(tokens)), [one.id for one in models])
    gpus = kinds_of_gpus(random, randomkit._gpus(cards))
    return Scenario(spec, tuple(models), gpus, trace, chosen, **{"sample_s": 0, **options})


def kinds_of_gpus(random: Random, gpus: tuple[Gpu, ...], node_gpus: int = 2) -> tuple[Gpu, ...]:
    """These GPUs, in a third of the cases of several kinds, one a node."""
    return randomkit._mixed(random, gpus, node_gpus=node_gpus) if random.random() < 0.3 else gpus


def _prompts(kv_tokens: int) -> list[int]:
    """Prompts, some of which just fit a small memory, or just do not."""
    return PROMPTS + [int(kv_tokens * part) for part in (0.95, 0.98, 1.0) if kv_tokens <= 2500]


def _instances(random: Random, name: str, **options: Any) -> Scenario:
    one = model(random, "m", random.choice([1, 1, 2]))
    tokens = random.choice(KV_TOKENS)
    chosen = with_kv_tokens([one], tokens, settings(random))
    count = engines_gpus(name, one.tp) * random.randint(1, 2 if SYSTEMS[name].execution else 3)
    if SYSTEMS[name].drop is not None:
        count = one.tp * random.randint(2, 4)
    per_node = one.tp * random.choice([1, 2, 4])
    gpus = tuple(Gpu(gpu, gpu // per_node, H100, random.choice([1e8, 25e9])) for gpu in range(count))
    trace = trace_of(crowd_rows(random, 1, random.choice([0.1, 1.0]), _prompts(tokens)))
    gpus = kinds_of_gpus(random, gpus, per_node)
    return Scenario(system(name), (one,), gpus, trace, chosen, **{"sample_s": 0, **options})


def part(random: Random, name: str, ids: str, gpus: range, tp: int) -> tuple[list[ServedModel], dict[str, list[range]]]:
    """Models for these GPUs, and where each is pinned: together on one TP group, or one a group where none are shared."""
    groups = [range(first, first + tp) for first in range(gpus.start, gpus.stop - tp + 1, tp)]
    if name in ALONE:
        ids = ids[: len(groups)]
    models = [model(random, id, tp) for id in ids]
    return models, {one.id: [groups[number % len(groups)]] for number, one in enumerate(models)}


def on_gpus(spec: SystemSpec, groups: Mapping[str, Sequence[Sequence[int]]]) -> SystemSpec:
    """The system with its models pinned."""
    return SystemSpec.model_validate(
        spec.model_dump()
        | {"placement": pinned({id: [tuple(gpus) for gpus in places] for id, places in groups.items()})}
    )


def merged(first: Trace, second: Trace) -> tuple[Trace, np.ndarray, np.ndarray]:
    """Two traces of different models as one, and the rows of each in it."""
    arrival_s = np.concatenate([first.arrival_s, second.arrival_s])
    order = np.argsort(arrival_s, kind="stable")
    columns = {
        "arrival_s": arrival_s,
        "model": np.concatenate([first.model, second.model + np.int32(len(first.models))]).astype(np.int32),
        "prompt_tokens": np.concatenate([first.prompt_tokens, second.prompt_tokens]),
        "output_tokens": np.concatenate([first.output_tokens, second.output_tokens]),
    }
    rows = np.argsort(order, kind="stable")
    trace = Trace(
        **{name: column[order] for name, column in columns.items()},
        models=(*first.models, *second.models),
        source="test",
    )
    return trace, rows[: len(first)], rows[len(first) :]


def faster(gpu: catalog.GpuSpec, factor: float) -> catalog.GpuSpec:
    """The same GPU with everything but its memory so many times as fast."""
    rates = [name for name in type(gpu).model_fields if name.endswith("_per_s") and getattr(gpu, name)]
    return gpu.model_copy(update={name: getattr(gpu, name) * factor for name in rates})


WIDE = [
    ("llama-3.2-1b", "W16A16"),
    ("llama-3.1-8b", "W8A8"),
    ("llama-3.1-8b", "W4A16"),
    ("qwen2.5-14b", "W16A16"),
    ("qwen2.5-32b", "W16A16"),
    ("llama-3.1-70b", "W4A16"),
]


def wide(random: Random, name: str) -> Scenario:
    """Models of all sizes under settings of all sizes, on one to four GPUs; to be composed, not to be run."""
    chosen = EngineSettings(
        token_budget=random.choice([256, 2048, 8192]),
        max_sequences=random.choice([16, 256, 1024]),
        memory_utilization=random.choice([0.5, 0.7, 0.9]),
    )
    number = 1 if name in GROUPS else random.randint(1, 4)
    models = [
        replace(
            served(id, *random.choice(WIDE), tp=random.choice([1, 1, 2]), slo_s=random.choice([0.3, 1.0, 5.0])),
            rate_per_s=random.choice([0.1, 1.0, 5.0]),
        )
        for id in "abcd"[:number]
    ]
    trace = trace_of([(0.0, 16, 2)], [one.id for one in models])
    gpus = kinds_of_gpus(random, randomkit._gpus(random.randint(1, 4)))
    return Scenario(SYSTEMS[name], tuple(models), gpus, trace, chosen)
