"""An operator's expectations of the requests: rates and mean lengths of each model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import inf
from pathlib import Path

import numpy as np
from fineserve_traces import LengthPairs

from fineserve_sim.cluster import ServedModel
from fineserve_sim.cluster.compose.profiling import operating_points, typical
from fineserve_sim.experiment.file import schema
from fineserve_sim.experiment.file.degrees import least_degree
from fineserve_sim.experiment.file.resolve import ResolvedModel, Setup
from fineserve_sim.experiment.file.sources import lengths_key, model_rows, processes_of, recorded, source_named
from fineserve_sim.experiment.run.alone import own_gpus
from fineserve_sim.experiment.run.streams import stream

_MEAN_SAMPLE = 200_000


def base_rates(setup: Setup, load: str | None) -> dict[str, float]:
    """Expected requests per second of each model at rate scale 1."""
    if has_clients(setup):
        return _closed_rates(setup, 1.0)
    if setup.workload.trace is not None:
        return _recorded_rates(setup, load)
    if isinstance(setup.workload.arrivals, schema.ManyModels):
        scale, ids = setup.workload.arrivals.scale, [model.id for model in setup.models]
        return {name: scale * process.rate_per_s for name, process in zip(ids, processes_of(setup), strict=True)}
    total_share = sum(model.entry.share or 0.0 for model in setup.models)
    span_s = phased_s(setup)
    rates = {}
    for model in setup.models:
        entry = model.entry
        if entry.phases:
            rates[model.id] = sum(phase.duration_s * phase.rate_per_s for phase in entry.phases) / span_s
        elif entry.share is not None and load is not None:
            rates[model.id] = setup.loads[load].rate_per_s * entry.share / total_share
        else:
            rates[model.id] = entry.rate_per_s or 0.0
    return rates


def has_clients(setup: Setup) -> bool:
    """Whether requests are sent by clients that wait for their answers; then all models have some."""
    return setup.models[0].entry.clients is not None


def clients_at(model: ResolvedModel, rate_scale: float) -> int:
    """So many times as many clients as a model has in the file: whole ones, and at least one."""
    return max(1, round(rate_scale * (model.entry.clients or 0)))


def _closed_rates(setup: Setup, rate_scale: float) -> dict[str, float]:
    return {model.id: _closed_per_s(setup, model, clients_at(model, rate_scale)) for model in setup.models}


def _closed_per_s(setup: Setup, model: ResolvedModel, clients: int) -> float:
    """What the clients of a model would ask a second if it had its GPUs for itself: batches of so many mean requests, one after
    the other, with the time to think between them."""
    prompt, output = mean_lengths(setup, model.id)
    served = ServedModel(model.id, model.spec, model.precision, least_degree(setup, model), 0.0, inf, prompt, output)
    points = operating_points(typical(served), own_gpus(setup, served)[0].spec, setup.engine)
    batches, lasts_s = [point.batch for point in points], [point.batch / point.throughput_per_s for point in points]
    at_once = min(clients, batches[-1])
    batch_s = float(np.interp(at_once, batches, lasts_s)) * clients / at_once
    return clients / (batch_s + (model.entry.think_s or 0.0))


def phased_s(setup: Setup) -> float:
    """How long the longest phases last together; 0 without phases."""
    return max(sum(phase.duration_s for phase in model.entry.phases or ()) for model in setup.models)


def _recorded_rates(setup: Setup, load: str | None) -> dict[str, float]:
    total_per_s = _recorded_rate(setup) * stretch(setup, load)
    if setup.workload.assign == "share":
        shares = {model.id: model.entry.share or 0.0 for model in setup.models}
        return {name: total_per_s * share / sum(shares.values()) for name, share in shares.items()}
    trace, ids = recorded(setup), [model.id for model in setup.models]
    return {name: total_per_s * float(trace.requests[model_rows(setup, name)].sum()) / len(trace) for name in ids}


def _recorded_rate(setup: Setup) -> float:
    """Mean rate of the recorded trace. A trace of one moment counts as one second."""
    trace = recorded(setup)
    return len(trace) / (trace.last_s - trace.first_s or 1.0)


def stretch(setup: Setup, load: str | None) -> float:
    """How much faster a load plays a recorded trace so that its mean rate equals the load's."""
    return 1.0 if load is None else setup.loads[load].rate_per_s / _recorded_rate(setup)


def mean_lengths(setup: Setup, model: str) -> tuple[float, float]:
    """Mean prompt and output tokens that an operator would expect of ``model``, from the source, not from one run."""
    if setup.workload.trace is None:
        prompt, output = _source_means(*lengths_key(setup))
        told = setup.workload.conversations or schema.Conversations()
        return told.shared_tokens + prompt + (told.turns - 1) / 2 * (prompt + output), output
    trace, own = recorded(setup), model_rows(setup, model)
    if not trace.requests[own].sum():
        own = np.arange(len(trace.models))
    requests = int(trace.requests[own].sum())
    return float(trace.prompt_tokens[own].sum()) / requests, float(trace.output_tokens[own].sum()) / requests


@lru_cache(maxsize=8)
def _source_means(lengths: str | schema.FixedLengths, data_dir: Path | None) -> tuple[float, float]:
    source = source_named(lengths, data_dir)
    if isinstance(source, LengthPairs):
        prompt, output = source.prompt_tokens, source.output_tokens
    else:
        prompt, output = source.sample(stream(0, "mean lengths"), _MEAN_SAMPLE)
    return float(prompt.mean()), float(output.mean())


def expected_rates(setup: Setup, load: str | None, rate_scale: float) -> Mapping[str, float]:
    """Expected requests per second of each model in one run."""
    if has_clients(setup):
        return _closed_rates(setup, rate_scale)
    return {name: rate_per_s * rate_scale for name, rate_per_s in base_rates(setup, load).items()}
