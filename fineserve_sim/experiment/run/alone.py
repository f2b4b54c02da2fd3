"""A model by itself on idle GPUs: the engines that it may have, and the longest prompt whose first token is in time.

A prompt by itself is computed in steps of the token budget. No system gives its first token sooner, but those that keep
prefixes or cut an engine into stages: these have no such bound here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np

from fineserve_sim.catalog import GpuSpec
from fineserve_sim.cluster import EngineSettings, Gpu, ScenarioError, ServedModel
from fineserve_sim.cluster.compose.memory import caches_prefixes, fixed_bytes, kinds_of, legacy_kernel, slots_on
from fineserve_sim.cluster.compose.profiling import fastest, step_model
from fineserve_sim.experiment.file.degrees import AUTO, groups_by_degree
from fineserve_sim.experiment.file.resolve import ResolvedModel, Setup
from fineserve_sim.experiment.run.run_data import Floats, Ints
from fineserve_sim.latency import StepModel
from fineserve_sim.policy.memory.ledger import MemoryLedger
from fineserve_sim.policy.placement import tp_groups
from fineserve_sim.systems.spec import MemorySpec, SystemSpec

Engine = tuple[ServedModel, GpuSpec]
"""A model at a degree, and the GPUs that it runs on."""


def bounded(system: SystemSpec) -> bool:
    """Whether an idle engine is as fast as the system can be for one prompt."""
    return not caches_prefixes(system.memory) and system.execution is None and system.drop is None


def engines_of(setup: Setup, model: ResolvedModel) -> Iterator[Engine]:
    """The engines that a model may have: at its degree, or at each that the file leaves open, on each type of GPU."""
    tp = model.entry.tp
    for degree in groups_by_degree(setup, model) if tp == AUTO else [tp]:
        served = ServedModel(model.id, model.spec, model.precision, int(degree), 0.0, math.inf, 0.0, 0.0)
        yield from ((served, spec) for spec in dict.fromkeys(gpu.spec for gpu in setup.gpus))


def reach_tokens(setup: Setup, system: SystemSpec, ttft_slo_s: Mapping[str, float]) -> dict[str, int]:
    """By model, the tokens of the longest prompt whose first token an idle engine gives within the limit; it lacks models of
    which nothing bounds that."""
    if not bounded(system):
        return {}
    found = {}
    for model in setup.models:
        limit_s = ttft_slo_s.get(model.id, math.inf)
        if math.isfinite(limit_s):
            found[model.id] = max(
                (
                    reach_of(served, gpu, setup.engine, system.memory, limit_s)
                    for served, gpu in engines_of(setup, model)
                ),
                default=model.spec.max_context_tokens,
            )
    return found


def reach_of(served: ServedModel, gpu: GpuSpec, settings: EngineSettings, memory: MemorySpec, limit_s: float) -> int:
    """The longest prompt that one engine, idle, prefills within the limit; the whole context where no step time is known."""
    step = step_of(served, gpu, settings, memory)
    if step is None:
        return served.model.max_context_tokens
    return _reach(step, settings.token_budget, limit_s, served.model.max_context_tokens)


def step_of(served: ServedModel, gpu: GpuSpec, settings: EngineSettings, memory: MemorySpec) -> StepModel | None:
    """The step times of an engine; None where none are known, and for a data-parallel rank, which the others hold up."""
    if served.ranks > 1:
        return None
    try:
        return step_model(served, gpu, settings, legacy_kernel(memory))
    except (ScenarioError, ValueError):
        return None


def first_token_s(step: StepModel, prompt_tokens: int, budget: int) -> float:
    """Seconds to the first token of a prompt on an idle engine: chunks of ``budget`` tokens, of which the last one samples."""
    seconds, done = 0.0, 0
    while done < prompt_tokens:
        chunk = min(budget, prompt_tokens - done)
        pairs = chunk * done + chunk * (chunk + 1) // 2
        seconds += step.step_s(0, 0, chunk, pairs, done, int(done + chunk == prompt_tokens))
        done += chunk
    return seconds


def latencies_s(step: StepModel, budget: int, prompt_tokens: Ints, output_tokens: Ints) -> tuple[Floats, Floats]:
    """Seconds to the first token, and from it to the last one, of each request on an idle engine."""
    prompts, place = np.unique(prompt_tokens, return_inverse=True)
    first_s: Floats = np.array([first_token_s(step, tokens, budget) for tokens in prompts.tolist()])[place]
    steps_s = step.decode_steps_s(1, 0, int((prompt_tokens + output_tokens).max(initial=1)))
    ends_s = np.concatenate([[0.0], np.cumsum(steps_s)])
    decode_s: Floats = ends_s[prompt_tokens + output_tokens - 1] - ends_s[prompt_tokens]
    return first_s, decode_s


@lru_cache(maxsize=1024)
def _reach(step: StepModel, budget: int, limit_s: float, longest: int) -> int:
    return bisect_right(range(1, longest + 1), limit_s, key=lambda tokens: first_token_s(step, tokens, budget))


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
