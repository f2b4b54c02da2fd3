"""What no number of GPUs can do: each model by itself on idle GPUs against the limits, over its own requests.

A request is out of reach where an engine that does nothing else would miss its limit, where the model's context ends before
it, or where the engine's memory does. The share that is left bounds every system that neither keeps prefixes nor cuts
engines into stages. So a search for a higher share need not begin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import numpy as np

from fineserve_sim import catalog
from fineserve_sim.catalog import PrecisionSpec
from fineserve_sim.cluster import EngineSettings, Gpu
from fineserve_sim.cluster.compose.memory import fixed_bytes, geometry, usable_bytes
from fineserve_sim.experiment.file.degrees import AUTO, splitting_degrees
from fineserve_sim.experiment.file.metric_names import EACH, overall
from fineserve_sim.experiment.file.plan import Experiment, Point
from fineserve_sim.experiment.file.resolve import ResolvedModel, Setup
from fineserve_sim.experiment.run.alone import Engine, bounded, engines_of, latencies_s, reach_of, step_of
from fineserve_sim.experiment.run.run_data import Ints, Mask
from fineserve_sim.experiment.run.workload import build_trace
from fineserve_sim.systems.spec import MemorySpec

CAUSES = ("memory", "context", "ttft", "tpot", "e2e")
"""Why a request is out of reach; the first that applies is told."""

MOMENTS = ("ttft", "tpot", "e2e")

ROUNDING = 1 + 1e-9
"""Simulated times are sums of steps; a last bit is no miss."""

Targets = Mapping[str, float]
"""Shares of all requests by metric."""


class Lengths(NamedTuple):
    """Prompt and output tokens of the requests of one model."""

    prompt_tokens: Ints
    output_tokens: Ints


class Limit(NamedTuple):
    """Seconds that one model has for the first token, for each later one, and for the last one."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2e_s: float = math.inf


Phase = Literal["prefill_s", "decode_s"]

FASTER = 0.9
"""A phase in at most so much of the time is clearly faster."""


LEAST_KV = 0.25
"""A way out that leaves less than this of the KV memory is none under load."""


class Spent(NamedTuple):
    """Seconds of all requests, one after the other."""

    prefill_s: float
    decode_s: float


class Slow(NamedTuple):
    """A model whose requests miss their limits beside others, mostly in this phase."""

    model: str
    phase: Phase


class Change(NamedTuple):
    """Another degree or another precision of a model: the key of its entry in a file, and the value."""

    model: str
    key: str
    value: int | str

    def __str__(self) -> str:
        return f"{self.model} at TP {self.value}" if self.key == "tp" else f"{self.model} in {self.value}"


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of one model: its requests, their limits, and how its engines are set."""

    settings: EngineSettings
    memory: MemorySpec
    limit: Limit
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class Alone:
    """One model by itself: its requests, how many are out of reach by cause, and by the metric that they miss. ``fixed_bytes``
    of each GPU's ``usable_bytes`` are taken before any KV. ``reach_tokens``: the longest prompt whose first token is in time.
    ``would``: changes with which enough of its requests are within reach, where these were looked for."""

    model: str
    gpu: str
    tp: int
    requests: int
    limit: Limit
    causes: Mapping[str, int]
    missed: Mapping[str, int]
    prefill_s: float
    decode_s: float
    fixed_bytes: int
    usable_bytes: int
    context_tokens: int
    kv_tokens: int
    reach_tokens: int = 0
    would: tuple[Change, ...] | None = None

    def keeps(self, targets: Targets) -> bool:
        """Whether the model's own requests can keep the targets."""
        return all(self.within(metric) >= share for metric, share in targets.items())

    def within(self, metric: str) -> float:
        """The share of its requests that can be within the limit of a target."""
        return (self.requests - self.missed[overall(metric)]) / self.requests


@dataclass(frozen=True, slots=True)
class Feasibility:
    """All models of an experiment, each by itself, and what is asked of them together."""

    models: Sequence[Alone]
    targets: Targets

    @property
    def bounds(self) -> dict[str, float]:
        """The share of all requests, or of the worst model's, that can be within the limit of each target at most."""
        return {metric: self._bound(metric) for metric in self.targets}

    def _bound(self, metric: str) -> float:
        if metric.startswith(EACH):
            return min(model.within(metric) for model in self.models)
        requests = sum(model.requests for model in self.models)
        return (requests - sum(model.missed[metric] for model in self.models)) / requests

    @property
    def hopeless(self) -> bool:
        """Whether some target is above what is within reach."""
        return any(self.bounds[metric] < share for metric, share in self.targets.items())

    @property
    def worst(self) -> list[Alone]:
        """The models that cannot keep the targets themselves, the one with the most requests out of reach first."""
        found = [model for model in self.models if not model.keeps(self.targets)]
        return sorted(found, key=lambda model: -max(model.missed[overall(metric)] for metric in self.targets))

    @property
    def remedies(self) -> list[tuple[Change, ...]]:
        """What may be changed: the first way out of every model that cannot keep the targets, then the second where it has two.
        Where all can, the slow model's remedies."""
        models = self.worst or self.models
        ways = [model.would for model in models if model.would]
        found = zip_longest(*ways) if ways else ()
        first = [way[0] for way in ways]
        return [tuple(way or first[at] for at, way in enumerate(changes)) for changes in found]

    def told(self) -> dict[str, Any]:
        """As JSON has it: the shares within reach, and each model that cannot keep the targets."""
        return {"bounds": self.bounds, "models": [_told(model) for model in self.worst]}


def _told(model: Alone) -> dict[str, Any]:
    limit_s = {f"{moment}_slo_s": limit for moment, limit in zip(MOMENTS, model.limit, strict=True)}
    return {
        **{name: getattr(model, name) for name in ("model", "gpu", "tp", "requests")},
        **{name: value if math.isfinite(value) else None for name, value in limit_s.items()},
        "causes": dict(model.causes),
        **{name: getattr(model, name) for name in ("fixed_bytes", "usable_bytes")},
        **{name: getattr(model, name) for name in ("context_tokens", "kv_tokens", "reach_tokens")},
        "would": None if model.would is None else [change._asdict() for change in model.would],
    }


def feasibility(
    experiment: Experiment, point: Point, targets: Targets, slow: Slow | None = None, *, remedies: bool = True
) -> Feasibility | None:
    """Every model at one place for one system, alone; limits that follow from reference runs are left out. None where nothing
    bounds the system, or where the step times of a model are not known. ``slow``: a model whose ways out are told though it
    keeps the targets alone. Without ``remedies`` none are looked for, which takes longer than the rest."""
    setup = experiment.setup_of(point)
    system = setup.systems[point.system]
    if not bounded(system):
        return None
    lengths, models = _lengths(setup, point, experiment.file.seeds), []
    for model in setup.models:
        if len(lengths[model.id].prompt_tokens):
            limit = _limit(setup, model, point, targets)
            question = Question(setup.engine, system.memory, limit, _whole(setup, lengths[model.id]))
            found = alone(question, engines_of(setup, model))
            if found is None:
                return None
            keeps = found.keeps(targets)
            if remedies and (not keeps or (slow is not None and model.id == slow.model)):
                phase = slow.phase if keeps and slow is not None else None
                found = replace(found, would=tuple(_ways_out(setup, model, found, question, targets, phase)))
            models.append(found)
    return Feasibility(models, targets) if models else None


def _lengths(setup: Setup, point: Point, seeds: int) -> dict[str, Lengths]:
    """The measured requests of each model over all seeds."""
    found: dict[str, list[Lengths]] = {model.id: [] for model in setup.models}
    for seed in range(seeds):
        trace = build_trace(setup, point.load, point.rate_scale, seed)
        measured = np.arange(len(trace.model)) >= setup.workload.warmup_requests
        for number, name in enumerate(trace.models):
            own = measured & (trace.model == number)
            found[name].append(Lengths(trace.prompt_tokens[own], trace.output_tokens[own]))
    empty = np.empty(0, dtype=np.int64)
    return {
        name: Lengths(*(np.concatenate([empty, *(each[at] for each in parts)]) for at in (0, 1)))
        for name, parts in found.items()
    }


def _whole(setup: Setup, lengths: Lengths) -> Lengths:
    """What must be served at least: where an output that was cut is as good as a whole one, its first token."""
    cut = setup.slo.cut == "whole"
    return Lengths(lengths.prompt_tokens, np.ones_like(lengths.output_tokens)) if cut else lengths


def _limit(setup: Setup, model: ResolvedModel, point: Point, targets: Targets) -> Limit:
    """What the file itself says of the moments that are asked for."""
    slo = setup.slo
    ttft_s = math.inf if slo.ttft_s is None else slo.ttft_s * point.slo_scale
    every = (model.entry.ttft_slo_s or ttft_s, slo.tpot_s or math.inf, slo.e2e_s or math.inf)
    told = set(map(overall, targets))
    asked = ["slo_attainment" in told or f"{moment}_attainment" in told for moment in MOMENTS]
    return Limit(*(limit_s if wanted else math.inf for limit_s, wanted in zip(every, asked, strict=True)))


def _ways_out(
    setup: Setup, model: ResolvedModel, now: Alone, question: Question, targets: Targets, phase: Phase | None
) -> Iterator[Change]:
    """Other ways to run a model in which it keeps the targets by itself, with a ``phase`` that is clearly faster than now where
    one is given: the precision with the most bits, and the least degree above its own."""

    def better(changed: ResolvedModel) -> bool:
        found = alone(question, engines_of(setup, changed))
        if found is None or not found.keeps(targets) or found.kv_tokens < LEAST_KV * now.kv_tokens:
            return False
        return phase is None or getattr(found, phase) <= FASTER * getattr(now, phase)

    for precision in _others(model.precision):
        if better(replace(model, precision=precision)):
            yield Change(model.id, "precision", next(iter(precision.aliases), precision.name))
            break
    if model.entry.tp == AUTO:
        return
    for tp in splitting_degrees(model):
        if tp > now.tp and better(replace(model, entry=model.entry.model_copy(update={"tp": tp}))):
            yield Change(model.id, "tp", tp)
            break


def _others(own: PrecisionSpec) -> list[PrecisionSpec]:
    """Other precisions, those with the most bits first."""
    every = [each for each in catalog.precisions().values() if each.name != own.name]
    return sorted(every, key=lambda each: -(each.weight_bits + each.activation_bits + each.kv_bits))


def alone(question: Question, engines: Iterable[Engine]) -> Alone | None:
    """A model by itself on the best of its engines; a request that any of them serves is within reach. None where the step
    times of one are not known."""
    found: list[tuple[Alone, Engine]] = []
    reached: dict[str, Mask] = {}
    for engine in engines:
        causes = _causes(engine, question)
        if causes is None:
            return None
        missed = _missed(causes[0])
        reached = {metric: mask & reached.get(metric, mask) for metric, mask in missed.items()}
        found.append((_alone(engine, question, *causes, missed), engine))
    if not found:
        return None
    best, engine = min(found, key=lambda each: (each[0].missed["slo_attainment"], each[0].prefill_s))
    reach = reach_of(*engine, question.settings, question.memory, question.limit.ttft_s)
    return replace(best, missed={metric: int(mask.sum()) for metric, mask in reached.items()}, reach_tokens=reach)


def _causes(engine: Engine, question: Question) -> tuple[dict[str, Mask], Spent] | None:
    """Which requests an engine that does nothing else cannot serve in time, by cause, and what all take; None
    where no step time is known."""
    served, gpu = engine
    step = step_of(served, gpu, question.settings, question.memory)
    if step is None:
        return None
    prompt, output = question.lengths
    ttft_s, decode_s = latencies_s(step, question.settings.token_budget, prompt, output)
    longest, limit = served.model.max_context_tokens, question.limit
    causes = {
        "memory": prompt + output - 1 > _kv_tokens(engine, question.settings),
        "context": (prompt >= longest) | (prompt + output > longest),
        "ttft": ttft_s > limit.ttft_s * ROUNDING,
        "tpot": decode_s > limit.tpot_s * np.maximum(output - 1, 1) * ROUNDING,
        "e2e": ttft_s + decode_s > limit.e2e_s * ROUNDING,
    }
    return causes, Spent(float(ttft_s.sum()), float(decode_s.sum()))


def _kv_tokens(engine: Engine, settings: EngineSettings) -> int:
    """Tokens of KV on the GPUs of an engine that shares them with none."""
    served, gpu = engine
    left_bytes = usable_bytes(Gpu(0, 0, gpu), settings) - fixed_bytes(served, settings)
    return max(0, int(left_bytes // geometry(served, settings).token_bytes))


def _missed(causes: Mapping[str, Mask]) -> dict[str, Mask]:
    """Requests out of reach by metric, as attainments count them."""
    unserved = causes["memory"] | causes["context"]
    found = {f"{moment}_attainment": unserved | causes[moment] for moment in MOMENTS}
    return found | {"slo_attainment": np.logical_or.reduce(list(found.values()))}


def _alone(
    engine: Engine, question: Question, causes: Mapping[str, Mask], spent: Spent, missed: Mapping[str, Mask]
) -> Alone:
    served, gpu = engine
    first = np.select([causes[cause] for cause in CAUSES], range(1, len(CAUSES) + 1), 0)
    counts = np.bincount(first, minlength=len(CAUSES) + 1)[1:]
    return Alone(
        model=served.id,
        gpu=gpu.whole or gpu.name,
        tp=served.tp,
        requests=len(first),
        limit=question.limit,
        causes={cause: int(count) for cause, count in zip(CAUSES, counts, strict=True)},
        missed={metric: int(mask.sum()) for metric, mask in missed.items()},
        prefill_s=spent.prefill_s,
        decode_s=spent.decode_s,
        fixed_bytes=fixed_bytes(served, question.settings),
        usable_bytes=usable_bytes(Gpu(0, 0, gpu), question.settings),
        context_tokens=served.model.max_context_tokens,
        kv_tokens=_kv_tokens(engine, question.settings),
    )
