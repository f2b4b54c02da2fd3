"""The prediction of a case: TTFT and TPOT of the measured rows, from the step model and the engines alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from fineserve_evidence.validate.cases import (
    BLOCK_TOKENS,
    SEED,
    Apart,
    BenchmarkRun,
    Case,
    ClosedLoop,
    Floats,
    MeasuredSet,
    OpenLoop,
    Sensitivity,
    Serving,
    SharedLoop,
    StaticBatch,
)
from fineserve_evidence.validate.engines import EngineRun, Instance, Requests, Role
from fineserve_sim.catalog import (
    Deployment,
    GpuSpec,
    ModelSpec,
    PrecisionSpec,
    data_ranks,
    grows_evenly,
    kv_sequence_bytes,
    kv_token_bytes,
)
from fineserve_sim.cluster.compose.memory import fixed_bytes, usable_bytes
from fineserve_sim.cluster.engine.sequence import Prefix
from fineserve_sim.cluster.scenario import EngineSettings, Gpu, ServedModel
from fineserve_sim.latency import StepModel

StepFactory: TypeAlias = Callable[[ModelSpec, PrecisionSpec, int, GpuSpec, Deployment], StepModel]
"""A class of step models, called with model, precision, TP, GPU and deployment."""
StepsOf: TypeAlias = Callable[[Serving], StepModel]
"""The step model of an engine setting."""

SEND_GAP_S = 1e-5
"""The gap between requests of a static batch is shorter than any step, so that only their order matters."""
SENSITIVITY_STRIDE = 4
"""Another assumption is tried on every fourth case."""
MOST_TRIED = 60
"""Named readings are tried on every case of an engine and version with at most so many cases."""


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
    """A case with its predicted rows, shapes as measured. Open loops that say when they started have a throughput, runs of a
    benchmark the seconds of the whole."""

    case: Case
    ttft_s: Floats
    tpot_s: Floats
    throughput_per_s: Floats | None = None
    whole_s: float | None = None


def predict_set(measured: MeasuredSet, make_step: StepFactory) -> list[Predicted]:
    """Predict all cases. ``make_step`` is called once for each engine setting."""
    steps = remembered(make_step)
    return [_predict(case, steps) for case in measured.cases]


def remembered(make_step: StepFactory) -> StepsOf:
    """Wrap ``make_step`` so that it builds the steps of a setting once. Deployments count as equal by name."""
    built: dict[tuple[ModelSpec, str, int, GpuSpec, str, float], StepModel] = {}

    def steps(of: Serving) -> StepModel:
        key = (of.model, of.precision.name, of.tp, of.gpu, of.deployment.name, of.step_time_factor)
        if key not in built:
            built[key] = make_step(of.model, of.precision, of.tp, of.gpu, of.deployment)
            if of.step_time_factor != 1.0:
                built[key].slow_down(of.step_time_factor)
        return built[key]

    return steps


def sensitivity(measured: MeasuredSet, what: Sensitivity) -> tuple[MeasuredSet, MeasuredSet]:
    """Take every fourth case as assumed, and the same cases read otherwise."""
    some = measured.cases[::SENSITIVITY_STRIDE]
    changed = tuple(what.change(case) for case in some)
    return replace(measured, cases=some), replace(measured, cases=changed)


def campaign(measured: MeasuredSet, engine: str) -> MeasuredSet:
    """Select the cases of one engine and version, at least a quarter of them."""
    mine = [case for case in measured.cases if case.campaign == engine and case.reading]
    return replace(measured, cases=tuple(mine[:: SENSITIVITY_STRIDE if len(mine) > MOST_TRIED else 1]))


def _predict(case: Case, steps: StepsOf) -> Predicted:
    serving, load = case.serving, case.load
    step = steps(serving)
    throughput = None
    others = None if case.apart is None else (case.apart, steps(case.apart.serving))
    if isinstance(load, BenchmarkRun):
        return Predicted(case, case.ttft_s, case.tpot_s, whole_s=_whole(step, load, serving))
    if isinstance(load, StaticBatch):
        ttft, tpot = _static(step, load, serving)
    elif isinstance(load, ClosedLoop):
        ttft, tpot = _closed(step, load, serving, others)
    elif isinstance(load, SharedLoop):
        ttft, tpot, throughput = _shared(step, load, serving)
    elif load.each:
        ttft, tpot = _open(step, load, serving, others)
    else:
        ttft, tpot, throughput = _means(step, load, serving)
    ahead_s = serving.steps_ahead * float(np.nan_to_num(_mean(tpot)))
    return Predicted(case, ttft + serving.api.seconds(_prompt_tokens(load)) + ahead_s, tpot, throughput)


def _prompt_tokens(load: StaticBatch | ClosedLoop | SharedLoop | OpenLoop) -> Floats:
    """Tokens of the prompts of each row, or their mean where a row is one."""
    if isinstance(load, ClosedLoop):
        return np.array([load.prompt_tokens * (1 + load.shortest) / 2])
    if not isinstance(load, OpenLoop):
        return np.array([load.prompt_tokens], dtype=np.float64)
    if load.each:
        return load.prompt_tokens.astype(np.float64)
    return np.array([load.prompt_tokens[load.model == model].mean() for model in range(load.models)])


def _static(step: StepModel, load: StaticBatch, serving: Serving) -> tuple[Floats, Floats]:
    """Means over the batch's requests."""
    if load.whole_prompts:
        return _static_whole(step, load, serving)
    n = load.batch
    requests = Requests(np.zeros(n, dtype=np.int64), np.full(n, load.prompt_tokens), np.full(n, load.output_tokens))
    running = min(serving.max_sequences, serving.token_budget)
    run = EngineRun([_instance(0, 0, step, serving)], requests, _settings(serving, running))
    times = run.open_loop(np.arange(n, dtype=np.float64) * (0.0 if load.together else SEND_GAP_S))
    return np.array([_mean(times.ttft_s)]), np.array([_mean(times.tpot_s(requests.output_tokens))])


def _static_whole(step: StepModel, load: StaticBatch, serving: Serving) -> tuple[Floats, Floats]:
    """Of the first group of prompts: its prefill, and the others' with the decodes after it."""
    tokens, most = load.prompt_tokens, max(1, serving.token_budget // load.prompt_tokens)
    sizes = [min(most, load.batch - done) for done in range(0, load.batch, most)]
    first_s, *others_s = (step.step_s(0, 0, n * tokens, n * tokens * (tokens + 1) / 2, 0, n) for n in sizes)
    gaps = load.output_tokens - 1
    decodes_s = float(step.decode_steps_s(load.batch, load.batch * tokens, gaps).sum())
    return np.array([first_s]), np.array([(sum(others_s) + decodes_s) / gaps])


def _mean(values: Floats) -> float:
    """Over the requests that have the value; NaN where none has."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else np.nan


Others = tuple[Apart, StepModel] | None
"""Engines that decode what others prefill, and their steps."""


def _apart(step: StepModel, serving: Serving, others: tuple[Apart, StepModel]) -> list[Instance]:
    """The engines of both roles, each on a GPU of its own, or each of its data-parallel ranks."""
    apart, decodes = others
    roles: list[tuple[Role, int, Serving, StepModel]] = [
        ("prefill", apart.prefill, serving, step),
        ("decode", apart.decode, apart.serving, decodes),
    ]
    found: list[Instance] = []
    for role, engines, of, its_step in roles:
        for _ in range(engines):
            group = len(found)
            for gpu in range(group, group + data_ranks(of.model)):
                one = _instance(0, gpu, its_step, of)
                found.append(replace(one, role=role, group=group, node=gpu if apart.nodes else 0))
    return found


def _closed(step: StepModel, load: ClosedLoop, serving: Serving, others: Others = None) -> tuple[Floats, Floats]:
    """Means over all requests, as the benchmark clients report them."""
    rng = np.random.default_rng(SEED)
    lengths = [
        rng.integers(max(1, int(nominal * load.shortest)), nominal + 1, load.requests)
        for nominal in (load.prompt_tokens, load.output_tokens)
    ]
    requests = Requests(np.zeros(load.requests, dtype=np.int64), lengths[0], lengths[1])
    running = min(serving.max_sequences, load.max_running or serving.max_sequences)
    settings = _settings(serving, running)
    if others is None:
        engines = [_instance(0, rank, step, serving) for rank in range(data_ranks(serving.model))]
        run = EngineRun(engines, requests, settings, front_end=serving.front_end)
    else:
        run = EngineRun(_apart(step, serving, others), requests, settings, setup_s=others[0].setup_s)
    times = run.closed_loop(load.clients, load.start_gap_s)
    return np.array([_mean(times.ttft_s)]), np.array([_mean(times.tpot_s(requests.output_tokens))])


def _whole(step: StepModel, load: BenchmarkRun, serving: Serving) -> float:
    """The seconds of the run or the mean of its requests'. A client's requests pass the front end one after another."""
    n = len(load.prompt_tokens)
    requests = Requests(np.zeros(n, dtype=np.int64), load.prompt_tokens, load.output_tokens)
    engines = [_instance(0, rank, step, serving) for rank in range(data_ranks(serving.model))]
    run = EngineRun(engines, requests, _settings(serving, serving.max_sequences))
    times = run.open_loop(np.arange(n, dtype=np.float64) * load.gap_s, load.clients)
    api_s = float(serving.api.seconds(load.prompt_tokens).mean())
    if load.whole == "latency":
        return _mean(times.finish_s - times.arrival_s) + api_s
    turns = -(-n // load.clients)
    burst = load.clients if load.burst_queues else 1
    return float(np.max(times.finish_s)) + (turns - 1 + burst) * api_s


def _shared(step: StepModel, load: SharedLoop, serving: Serving) -> tuple[Floats, Floats, Floats]:
    """Medians over the measured requests of all engines, and how many of them end a second."""
    n = load.models * load.requests
    model = np.arange(n) % load.models
    requests = Requests(model, np.full(n, load.prompt_tokens), np.full(n, load.output_tokens))
    instances = [_instance(each, 0, step, serving) for each in range(load.models)]
    settings = _settings(serving, serving.max_sequences)
    run = EngineRun(instances, requests, settings, sharing=load.sharing, sm_share=load.sm_share)
    times, counts = run.closed_loop(load.clients), np.arange(n) // load.models >= load.warmup
    lasted_s = float(times.finish_s[counts].max() - times.arrival_s[counts].min())
    ttft, tpot = (np.median(values[counts]) for values in (times.ttft_s, times.tpot_s(requests.output_tokens)))
    return np.array([ttft]), np.array([tpot]), np.array([counts.sum() / lasted_s])


def _open(step: StepModel, load: OpenLoop, serving: Serving, others: Others = None) -> tuple[Floats, Floats]:
    """Of single requests the mean over the phases' runs."""
    if load.phases == 1:
        return _open_run(step, load, serving, others)
    rng, width_s = np.random.default_rng(SEED), step.step_s(1, int(load.prompt_tokens.mean()), 0, 0, 0, 1)
    delays_s = width_s * rng.random((load.phases, len(load.arrival_s)))
    runs = [_out_of_phase(step, load, serving, delay_s, others) for delay_s in delays_s]
    ttft, tpot = (np.mean(columns, axis=0) for columns in zip(*runs, strict=True))
    return ttft, tpot


def _means(step: StepModel, load: OpenLoop, serving: Serving) -> tuple[Floats, Floats, Floats | None]:
    """Means a model of one run, and its requests a second from the start of its client to the last token."""
    ttft, tpot = _open_run(step, load, serving)
    of = [load.model == model for model in range(load.models)]
    throughput = None
    if load.starts_s:
        end_s = load.arrival_s + ttft + np.nan_to_num(tpot) * (load.output_tokens - 1)
        spans_s = [end_s[mine].max() - start_s for mine, start_s in zip(of, load.starts_s, strict=True)]
        throughput = np.array([mine.sum() for mine in of]) / np.array(spans_s)
    ttft, tpot = (np.array([_mean(values[mine]) for mine in of]) for values in (ttft, tpot))
    return ttft, tpot, throughput


def _out_of_phase(
    step: StepModel, load: OpenLoop, serving: Serving, delay_s: Floats, others: Others
) -> tuple[Floats, Floats]:
    """Seconds of each request when the engines see it ``delay_s`` later."""
    arrival_s = load.arrival_s + delay_s
    order = np.argsort(arrival_s, kind="stable")
    columns = {name: getattr(load, name)[order] for name in ("model", "prompt_tokens", "output_tokens")}
    blocks = None if load.blocks is None else tuple(load.blocks[request] for request in order)
    delayed = replace(load, arrival_s=arrival_s[order], blocks=blocks, **columns)
    back = np.argsort(order)
    ttft, tpot = _open_run(step, delayed, serving, others)
    return ttft[back], tpot[back]


def _open_run(step: StepModel, load: OpenLoop, serving: Serving, others: Others = None) -> tuple[Floats, Floats]:
    """TTFT and TPOT of each request, shape (n,)."""
    if others is None:
        instances = [_instance(model, 0, step, serving) for model in range(load.models)]
        instances += [_instance(0, gpu, step, serving) for gpu in range(1, load.replicas)]
    else:
        instances = _apart(step, serving, others)
    requests = Requests(load.model, load.prompt_tokens, load.output_tokens)
    settings = _settings(serving, serving.max_sequences)
    run = EngineRun(
        instances,
        requests,
        settings,
        shared_kv=load.shared_kv,
        sharing=load.sharing,
        prefixes=_prefixes(load),
        setup_s=0.0 if others is None else others[0].setup_s,
    )
    times = run.open_loop(load.arrival_s, load.most_under_way)
    return times.ttft_s, times.tpot_s(load.output_tokens)


def _prefixes(load: OpenLoop) -> list[Prefix]:
    """The known blocks of each request; none where nothing is cached."""
    return [Prefix(names, BLOCK_TOKENS, len(names) * BLOCK_TOKENS) for names in load.blocks or ()]


def kv_bytes(serving: Serving) -> int:
    """Compute the bytes for KV on each GPU of this engine, as vLLM would. They are negative where the model does not fit."""
    settings = _settings(serving, serving.max_sequences)
    return usable_bytes(Gpu(0, 0, serving.gpu), settings) - fixed_bytes(_served(serving), settings)


def block_bytes(serving: Serving) -> int:
    """Compute the bytes of one KV block on each GPU."""
    engine, tokens = (serving.model, serving.precision, serving.tp), serving.mean_tokens
    if tokens and not grows_evenly(serving.model):
        return -(-BLOCK_TOKENS * kv_sequence_bytes(*engine, tokens) // tokens)
    return BLOCK_TOKENS * kv_token_bytes(*engine)


def _served(serving: Serving) -> ServedModel:
    """The model as the cluster's budget takes it, which asks for no load and no SLO."""
    return ServedModel(serving.model.name, serving.model, serving.precision, serving.tp, 1.0, 1.0, 1.0, 1.0)


def _instance(model: int, gpu: int, step: StepModel, serving: Serving) -> Instance:
    return Instance(model, gpu, step, kv_bytes(serving), block_bytes(serving))


def _settings(serving: Serving, max_sequences: int) -> EngineSettings:
    return EngineSettings(
        token_budget=serving.token_budget,
        max_sequences=max_sequences,
        block_tokens=BLOCK_TOKENS,
        memory_utilization=serving.memory_utilization,
        deployment=serving.deployment.name,
        batching=serving.batching,
        static_part=serving.batching != "vllm",
    )
