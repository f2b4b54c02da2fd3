"""What results mean: relations between runs, or between a run and the world, that hold whatever the program computes.

Laws (``lawkit``) compare the program with itself: a wrong number passes them if it is wrong everywhere. Each function here
draws one situation for one system from a ``Random``, and returns what is wrong, or None. Its docstring says why it must
hold, for schedulers have anomalies (Graham 1969): on a better machine a request may end later, because it meets others
earlier. So single requests are compared where each has its engine for itself (*calm*), or where no time decides which
batches are formed (all come at once, first come first served). In other crowds the work as a whole is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from drawkit import (
    ALONE,
    BOUNDS,
    CALM_S,
    FCFS,
    FLEETS,
    GROUPS,
    KV_TOKENS,
    STATIC,
    SYSTEMS,
    calm_rows,
    cluster,
    crowd_rows,
    engines_gpus,
    faster,
    lone,
    merged,
    model,
    on_gpus,
    part,
    settings,
    system,
    wide,
    with_kv_tokens,
)
from fineserve_traces import conversations
from meaningkit import Meaning, differing, later, longer, lost
from randomkit import SLOW
from simkit import H100, fixed_bytes, trace_of, with_usable_bytes

from fineserve_sim import catalog
from fineserve_sim.cluster import Fate, Gpu, Scenario, simulate
from fineserve_sim.cluster.compose.memory import engine_block_tokens, legacy_kernel, usable_bytes
from fineserve_sim.cluster.compose.profiling import step_model
from fineserve_sim.cluster.simulation import prepare

ROOMY_TOKENS = 20_000
"""More than all requests of a crowd hold together."""

# --- a better machine is never worse ------------------------------------------------------------------------------------


def more_memory(random: Random, name: str) -> str | None:
    """One engine with more KV memory.

    Calm: nothing that was answered is refused, and nothing is later: a request alone never waits for memory.
    Short crowd, first come first served: nothing that was answered is refused, and where both do all the work, the last
    request ends no later but for a part of the work that is recomputed: more requests run beside each other and may
    push each other out. (Preemptions may grow in number: where one request fits, none can be pushed out.)
    Roomy crowd: memory that is never short changes nothing at all, under any scheduler.
    """
    kind = random.choice(["calm", "short", "roomy"] if name in FCFS else ["calm", "roomy"])
    less, more = (ROOMY_TOKENS, 2 * ROOMY_TOKENS) if kind == "roomy" else sorted(random.sample(KV_TOKENS, 2))
    rows = calm_rows(random) if kind == "calm" else crowd_rows(random, span_s=random.choice([0.0, 0.4, 2.0]))
    scenario = lone(random, name, rows, less)
    base = simulate(scenario)
    better = simulate(replace(scenario, engine=with_kv_tokens(scenario.models, more, scenario.engine)))
    if kind == "calm":
        return later(better, base)
    if kind == "roomy":
        return differing(better, base)
    return lost(better, base) or longer(better, base, tolerance=0.02)


def faster_gpu(random: Random, name: str) -> str | None:
    """One engine on a GPU whose every rate is higher, with as much memory.

    Calm: every step is shorter, so every request is earlier. All at once, first come first served: batches are formed by
    counts alone, the same ones on both, so again every request is earlier. Spread crowd, first come first served: the
    work as a whole is done no later, but for the last steps. The bound: no fewer requests are in time.
    A share of the SMs by the rate of a model (MuxServe) would be smaller on the faster GPU: here it is all of them.
    """
    kind = random.choice(["calm", "at once", "spread"] if name in FCFS else ["calm"])
    if name in BOUNDS:
        kind = "bound"
    rows = calm_rows(random) if kind == "calm" else crowd_rows(random, span_s=0.0 if kind == "at once" else 1.0)
    scenario = lone(random, name, rows, sharing="mps")
    spec, factor = catalog.gpu("h100-pcie"), random.choice([1.1, 1.5, 4.0])
    base, better = (
        simulate(replace(scenario, gpus=tuple(replace(gpu, spec=each) for gpu in scenario.gpus)))
        for each in (spec, faster(spec, factor))
    )
    if kind == "bound":
        fewer = np.count_nonzero(better.fate == Fate.FINISHED) < np.count_nonzero(base.fate == Fate.FINISHED)
        return "fewer requests are in time" if fewer else None
    if kind == "spread":
        return lost(better, base) or longer(better, base, tolerance=0.02)
    return later(better, base)


def faster_kind(random: Random, name: str) -> str | None:
    """Two models, each with an engine of its own on one of two kinds of GPU, of which one becomes faster.

    Calm: no request of the model there is later. The other kind is what it was, and so is all that becomes of its model.
    Shares of the SMs are all of them, as in ``faster_gpu``.
    """
    chosen, tp = settings(random), random.randint(1, 2)
    models = [model(random, id, tp) for id in "ab"]
    groups = {"a": [range(tp)], "b": [range(tp, 2 * tp)]}
    chosen = with_kv_tokens([max(models, key=lambda one: fixed_bytes([one], chosen))], random.choice(KV_TOKENS), chosen)
    trace = trace_of(calm_rows(random, 2), ["a", "b"])
    fast = faster(SLOW, random.choice([1.1, 1.5, 4.0]))
    base, better = (
        simulate(
            Scenario(
                on_gpus(_static(name, sharing="mps"), groups),
                tuple(models),
                tuple(Gpu(id, id // tp, H100 if id < tp else spec) for id in range(2 * tp)),
                trace,
                chosen,
                sample_s=0,
            )
        )
        for spec in (SLOW, fast)
    )
    rows = np.flatnonzero(trace.model == 0)
    return differing(better, base, of_one=rows, of_other=rows) or later(better, base)


def larger_cache(random: Random, name: str) -> str | None:
    """One engine that keeps prefixes in more memory, or keeps them at all, while conversations take turns.

    Each turn has the engine for itself. What is kept never keeps anything out, and of two memories in which the least
    recently used goes first, the larger holds all that the smaller does: no turn is later. The kernel of vLLM 0.4.2 stays
    out: it attends to a prefix so slowly that computing a short one anew may take less.
    """
    rows = [(CALM_S * number, random.choice([16, 90, 301]), random.choice([1, 40, 151])) for number in range(3)]
    turns = random.randint(1, 3)
    trace = conversations(
        trace_of(rows), turns=turns, gap_s=3 * CALM_S, shared_tokens=random.choice([0, 32]), hash_tokens=16
    )
    less, more = sorted(random.sample([1500, 1800, 2500, 4000, ROOMY_TOKENS], 2))  # the longest turn has 1,388 tokens
    keeps = random.random() < 0.7
    scenario = lone(random, name, trace, less, memory={"prefix_cache": keeps})
    more = more if keeps else less
    better = replace(
        scenario,
        system=with_memory(scenario, {"prefix_cache": True}),
        engine=with_kv_tokens(scenario.models, more, scenario.engine),
    )
    return later(simulate(better), simulate(scenario))


def with_memory(scenario: Scenario, options: dict[str, object]) -> Any:
    return scenario.system.model_copy(update={"memory": scenario.system.memory.model_copy(update=options)})


# --- work is done, once ---------------------------------------------------------------------------------------------------


def all_end(random: Random, name: str) -> str | None:
    """Every request ends, in one way or another, long before the horizon: none waits for ever behind another one. One that
    fits the empty engine is answered in full, unless the system drops what will be late. Where engines come and go, what an
    engine can hold does, too: there a model that has the cluster for itself must answer."""
    scenario = cluster(random, name)
    result = simulate(scenario)
    fitting = _fitting(scenario)
    may_drop = SYSTEMS[name].scheduler.policy in ("adaptive", "clairvoyant")
    trace = scenario.whole_trace
    for request in range(len(trace)):
        ended = Fate(result.fate[request])
        if ended == Fate.UNFINISHED:
            return f"request {request} never ends"
        tokens = int(trace.prompt_tokens[request] + trace.output_tokens[request])
        fits = tokens <= fitting.get(trace.models[trace.model[request]], 0)
        if fits and ended != Fate.FINISHED and not (may_drop and ended == Fate.DROPPED):
            return f"request {request} of {tokens} tokens fits an empty engine, and is {ended.name}"
        if fits and ended == Fate.FINISHED and result.generated_tokens[request] != trace.output_tokens[request]:
            return f"request {request} of {tokens} tokens fits an empty engine, and is cut"
    return None


def _fitting(scenario: Scenario) -> dict[str, int]:
    """By model that has engines, the longest sequence that each of them surely holds, all of them empty."""
    system, tokens = scenario.system, {}
    if system.residency is not None and len(scenario.models) > 1:
        return {}
    if system.scheduler.policy == "clairvoyant":
        return {one.id: one.model.max_context_tokens for one in scenario.models}
    for engine in prepare(scenario).parts.cluster.engines.values():
        one = next(one for one in scenario.models if one.id == engine.model)
        block = engine_block_tokens(one, scenario.engine, system.memory)
        longest = block if system.memory.policy == "contiguous" else one.model.max_context_tokens
        holds = min(longest, engine.kv.capacity_tokens())
        tokens[engine.model] = min(holds, tokens.get(engine.model, holds))
    return tokens


def second_turn(random: Random, name: str) -> str | None:
    """A turn on an idle engine that keeps prefixes, the whole conversation before it kept: its first token takes just one step
    over what is new. New is all behind the last full block of the first turn, prompt and answer, whose last token was never
    computed. Over how many tokens a name of a prefix goes makes no difference. The steps of static pipelines are not told
    apart: there a first turn whose prompt is the same text must leave as much behind as one that generated a part of it."""
    unit = random.choice([16, 48, 256])
    prompt, output, gap_s = random.randint(2, 600), random.randint(1, 600), 2 * CALM_S
    trace = conversations(trace_of([(0.0, prompt, output)]), turns=2, gap_s=gap_s, hash_tokens=unit)
    scenario = lone(random, name, trace, ROOMY_TOKENS, memory={"prefix_cache": True})
    scenario = replace(scenario, engine=replace(scenario.engine, token_budget=2048))
    scenario = replace(scenario, engine=with_kv_tokens(scenario.models, ROOMY_TOKENS, scenario.engine))
    (one,), second = scenario.models, int(trace.prompt_tokens[1])
    memory = scenario.system.memory
    block = engine_block_tokens(one, scenario.engine, memory)
    kept = min(prompt + output - 1, second - 1) // block * block
    ttft_s = simulate(scenario).first_token_s[1] - gap_s
    if SYSTEMS[name].execution is not None and SYSTEMS[name].execution.stages > 1:
        known = replace(
            trace, prompt_tokens=np.array([prompt + output - 1, second]), output_tokens=np.array([1, output])
        )
        wanted_s = simulate(replace(scenario, trace=known)).first_token_s[1] - gap_s
    else:
        step = step_model(one, scenario.gpus[0].spec, scenario.engine, legacy_kernel(memory))
        new = second - kept
        wanted_s = step.step_s(0, 0, new, new * kept + new * (new + 1) // 2, kept, 1)
    if abs(ttft_s - wanted_s) > 1e-6 * wanted_s:
        return f"turn 2 of {prompt} + {output} and {second} tokens takes {ttft_s} s to its first token, not {wanted_s}"
    return None


# --- memory ----------------------------------------------------------------------------------------------------------------


def all_fits(random: Random, name: str) -> str | None:
    """What the engines of a GPU take beside KV, and all KV memory that is given out there, is no more than the GPU has."""
    return _fleet_fits(cluster(random, name, sample_s=0.5)) if name in FLEETS else _placed_fits(wide(random, name))


def _placed_fits(scenario: Scenario) -> str | None:
    parts, models = prepare(scenario).parts, {one.id: one for one in scenario.models}
    taken: dict[int, int] = {}
    for instance in parts.placement.instances:
        for gpu in instance.gpus:
            taken[gpu] = taken.get(gpu, 0) + fixed_bytes([models[instance.model]], scenario.engine)
    for gpu, kv_bytes in zip(sorted(taken), parts.kv_capacity_bytes, strict=True):
        usable = usable_bytes(next(each for each in scenario.gpus if each.id == gpu), scenario.engine)
        if taken[gpu] + kv_bytes > usable:
            return f"GPU {gpu}: engines of {taken[gpu]} bytes and KV of {kv_bytes}, and it has {usable}"
    return None


def _fleet_fits(scenario: Scenario) -> str | None:
    """At each sample: engines that came before and leave later are there."""
    log: list[dict[str, Any]] = []
    result = simulate(replace(scenario, log=log.append))
    models = {one.id: one for one in scenario.models}
    stays = [[instance.model, instance.gpus, -1.0, np.inf] for instance in result.placement.instances]
    for line in log:
        if line.get("command") == "Activate":
            stays.append([line["model"], line["gpus"], line["now_s"], np.inf])
        elif line.get("event") == "EngineDrained" or (line.get("command") == "Evict" and not line["drain"]):
            stays[line["engine"]][3] = min(stays[line["engine"]][3], line["now_s"])
    timeline = result.timeline
    usable = {gpu.id: usable_bytes(gpu, scenario.engine) for gpu in scenario.gpus}
    for sample, now in enumerate(timeline.time_s.tolist()):
        taken = dict.fromkeys((gpu.id for gpu in scenario.gpus), 0)
        for model_id, gpus, came_s, left_s in stays:
            for gpu in gpus if came_s < now < left_s else ():
                taken[gpu] += fixed_bytes([models[model_id]], scenario.engine)
        free = timeline.gpu_free_bytes[sample] + timeline.gpu_stranded_bytes[sample]
        for (gpu, engines), left in zip(taken.items(), free.tolist(), strict=True):
            if engines + left > usable[gpu]:
                return f"at {now} s GPU {gpu} has engines of {engines} bytes and {left} free, of {usable[gpu]}"
        everything = sum(taken.values()) + int(free.sum()) + int(timeline.kv_used_bytes[sample].sum())
        if everything > sum(usable.values()):
            return f"at {now} s engines and KV take {everything} bytes of {sum(usable.values())}"
    return None


# --- what must not matter ----------------------------------------------------------------------------------------------------


def names_and_order(random: Random, name: str) -> str | None:
    """The same models under other names and in another order: the same becomes of every request. No two models are alike, for
    of two with the same footprint a placement must take one first."""
    scenario = cluster(random, name, differ=True)
    order = list(range(len(scenario.models)))
    random.shuffle(order)
    names = random.sample("zyxwvu", len(order))
    trace = scenario.whole_trace
    renamed = replace(
        scenario,
        models=tuple(replace(scenario.models[old], id=names[new]) for new, old in enumerate(order)),
        trace=replace(
            trace,
            models=tuple(names[: len(order)]),
            model=np.array([order.index(old) for old in trace.model.tolist()], dtype=np.int32),
        ),
    )
    return differing(simulate(renamed), simulate(scenario))


def halves(random: Random, name: str) -> str | None:
    """Two clusters that share nothing, on GPUs of one kind or two, simulated as one: the same becomes of every request, for
    nothing that one half does is seen in the other. The placement is given, and models stay where they are: else policies look
    at all GPUs."""
    chosen, size, tp = settings(random), random.randint(1, 2), 1
    spec, parts, groups = _static(name), [], {}
    for number, ids in enumerate(("ab", "cd")):
        gpus = range(number * size, (number + 1) * size)
        tp = random.choice([1, size])
        models, places = part(random, name, ids[: random.randint(1, 2)], gpus, tp)
        rows = crowd_rows(random, len(models), random.choice([0.4, 2.0]))
        parts.append((models, gpus, places, trace_of(rows, [one.id for one in models])))
        groups |= places
    kinds = [H100] * size + [random.choice([H100, SLOW])] * size
    fullest = max((models for models, *_ in parts), key=lambda models: fixed_bytes(models, chosen))
    chosen = with_kv_tokens(fullest, random.choice(KV_TOKENS), chosen)
    alone = [
        simulate(Scenario(on_gpus(spec, places), tuple(models), _gpus(gpus, kinds), trace, chosen, sample_s=0))
        for models, gpus, places, trace in parts
    ]
    (first, *_, one), (second, *_, other) = parts
    trace, *rows = merged(one, other)
    log = random.choice([None, [].append])  # with a log all engines are simulated together
    union = Scenario(
        on_gpus(spec, groups), (*first, *second), _gpus(range(2 * size), kinds), trace, chosen, sample_s=0, log=log
    )
    whole = simulate(union)
    problems = [differing(whole, half, of_one=own) for half, own in zip(alone, rows, strict=True)]
    return next(filter(None, problems), None)


def _gpus(ids: range, kinds: Sequence[catalog.GpuSpec] = ()) -> tuple[Gpu, ...]:
    return tuple(Gpu(id, 0, kinds[id] if kinds else H100) for id in ids)


def _static(name: str, **changes: Any) -> Any:
    """The system with models that stay, engines as they are placed."""
    if name in FLEETS:
        changes["residency"] = {"evict": False, "move": False}
    if name in BOUNDS:
        changes["scheduler"] = {"engines": "placed"}
    return system(name, **changes)


def idle_model(random: Random, name: str) -> str | None:
    """A model without traffic beside others, on GPUs with so much more memory as its engine takes: nothing changes for the
    others. Where each model has GPUs of its own, it has some as well. Where it is due a share of the KV memory (private
    pools, buffers of pages), there is room for all."""
    chosen, tp = settings(random), random.randint(1, 2)
    alone = name in ALONE
    ids = "a" if alone or name == "qlm" else "abc"[: random.randint(1, 3)]
    models = [model(random, id, tp) for id in ids]
    idle = replace(random.choice(models), id="z", rate_per_s=random.choice([0.0, 1.0]))
    shared = SYSTEMS[name].memory.policy == "kv_slab"
    here = with_kv_tokens(models, random.choice(KV_TOKENS) if shared or alone else 15 * ROOMY_TOKENS, chosen)
    rows = crowd_rows(random, len(models), random.choice([0.4, 2.0]))
    gpus, groups = _gpus(range(2 * tp if alone else tp)), {one.id: [range(tp)] for one in models}
    trace = trace_of(rows, [one.id for one in models])
    without = Scenario(on_gpus(system(name), groups), tuple(models), gpus, trace, here, sample_s=0)
    groups["z"] = [range(tp, 2 * tp) if alone else range(tp)]
    there = here if alone or name in ("qlm", *BOUNDS) else _with_more(here, fixed_bytes([idle], here))
    placed = system(name) if name == "qlm" else on_gpus(system(name), groups)
    beside = replace(
        without, system=placed, models=(*models, idle), engine=there, trace=replace(trace, models=(*trace.models, "z"))
    )
    return differing(simulate(beside), simulate(without))


def _with_more(engine: Any, more_bytes: int) -> Any:
    return with_usable_bytes(usable_bytes(Gpu(0, 0, H100), engine) + more_bytes, engine)


def doubled(random: Random, name: str) -> str | None:
    """Twice the replicas on twice the GPUs, and each request twice at the same moment: turns and loads send one to each
    half, which is the single cluster again. So every percentile is the same to the last bit: there is no noise to allow for.
    Pipelines that form on demand unite the halves: those systems have room enough not to form any. Llumnix stays out: it looks
    at requests that run and the head of a queue, so that of several at one moment it sends the second and third alike."""
    chosen, tp = settings(random), random.randint(1, 2)
    if name in GROUPS:
        models, tokens = [model(random, "m", tp)], random.choice(KV_TOKENS)
        tokens = ROOMY_TOKENS if SYSTEMS[name].drop is not None else tokens
    else:
        models, tokens = [model(random, id, tp) for id in "abc"[: 1 if name in ALONE else random.randint(1, 3)]], None
        tokens = random.choice(KV_TOKENS)
    chosen = with_kv_tokens(models, tokens, chosen)
    rows = crowd_rows(random, len(models), random.choice([0.0, 0.4, 2.0]))
    size = engines_gpus(name, tp)
    results = []
    for times in (1, 2):
        groups = {one.id: [range(tp * half, tp * (half + 1)) for half in range(times)] for one in models}
        spec = system(name) if name in GROUPS else on_gpus(_static(name), groups)
        trace = trace_of([row for row in rows for _ in range(times)], [one.id for one in models])
        scenario = Scenario(spec, tuple(models), _gpus(range(times * size)), trace, chosen, sample_s=0)
        results.append(simulate(scenario))
    once, twice = results
    for name_ in ("first_token_s", "finish_s"):
        a, b = np.sort(getattr(once, name_) - _arrivals(rows)), np.sort(getattr(twice, name_) - _arrivals(rows, 2))
        if not np.allclose(np.repeat(a, 2), b, rtol=1e-9, atol=0.0, equal_nan=True):
            return f"{name_} behind arrivals: {a} once, {b[::2]} and {b[1::2]} twice"
    return None


def _arrivals(rows: list[Any], times: int = 1) -> np.ndarray:
    return np.repeat([row[0] for row in rows], times)


CACHING = tuple(
    name
    for name, spec in SYSTEMS.items()
    if spec.memory.policy in ("private", "vtensor") and not (spec.migration or spec.roles) and name not in BOUNDS
)
EVERY = tuple(SYSTEMS)

MEANINGS: dict[str, Meaning] = {
    law.__name__: Meaning(law, systems)
    for law, systems in (
        (more_memory, EVERY),
        (faster_gpu, EVERY),
        (faster_kind, (*STATIC, "prism")),
        (larger_cache, tuple(name for name in CACHING if name != "vllm-v0.4.2")),
        (all_end, EVERY),
        (second_turn, CACHING),
        (all_fits, tuple(name for name in EVERY if name not in BOUNDS)),
        (names_and_order, EVERY),
        (halves, (*STATIC, "prism", *BOUNDS)),
        (idle_model, (*STATIC, *FLEETS, *BOUNDS)),
        (doubled, tuple(name for name in (*STATIC, *GROUPS) if not (SYSTEMS[name].migration or SYSTEMS[name].roles))),
    )
}
