"""Other readings of what a set does not record, as changes of a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
from fineserve_traces import arrivals

from fineserve_calibrate.validate.cases import Case, ClosedLoop, OpenLoop, StaticBatch
from fineserve_sim.catalog import precision

Change = Callable[[Case], Case]
SEED = 20240711


def with_budget(token_budget: int) -> Change:
    """Another token budget of a step."""
    return lambda case: replace(case, serving=replace(case.serving, token_budget=token_budget))


def with_rounds(requests_per_client: int) -> Change:
    """Another number of requests a client of a closed loop."""

    def change(case: Case) -> Case:
        if not isinstance(case.load, ClosedLoop):
            return case
        return replace(case, load=replace(case.load, requests=requests_per_client * case.load.clients))

    return change


def with_full_lengths(case: Case) -> Case:
    """Every request of a closed loop has the nominal lengths."""
    return replace(case, load=replace(case.load, shortest=1.0)) if isinstance(case.load, ClosedLoop) else case


def with_all_slots(case: Case) -> Case:
    """The engine of a closed loop runs as many requests as there are clients."""
    return replace(case, load=replace(case.load, max_running=None)) if isinstance(case.load, ClosedLoop) else case


def with_whole_batch(case: Case) -> Case:
    """The prompts of a static batch reach the engine together."""
    return replace(case, load=replace(case.load, together=True)) if isinstance(case.load, StaticBatch) else case


def with_tp(tp: int) -> Change:
    """Another TP degree."""
    return lambda case: replace(case, serving=replace(case.serving, tp=tp))


def with_8bit_kv(case: Case) -> Case:
    """FP8 checkpoints keep their KV in 8 bits, too."""
    if case.serving.precision.name != "W8A8":
        return case
    return replace(case, serving=replace(case.serving, precision=precision("W8A8KV8")))


def with_utilization(share: float) -> Change:
    """Another share of the GPU's memory."""
    return lambda case: replace(case, serving=replace(case.serving, memory_utilization=share))


def with_steps_ahead(steps: int) -> Change:
    """Another number of steps scheduled ahead."""
    return lambda case: replace(case, serving=replace(case.serving, steps_ahead=steps))


def with_sharing(law: Literal["fluid", "time_slice"]) -> Change:
    """Another law of sharing a GPU."""
    return lambda case: replace(case, load=replace(case.load, sharing=law)) if isinstance(case.load, OpenLoop) else case


def with_replicas(replicas: int, utilization: float) -> Change:
    """Another number of engines that share the requests, with another share of their GPUs' memory."""

    def change(case: Case) -> Case:
        if not isinstance(case.load, OpenLoop):
            return case
        return with_utilization(utilization)(replace(case, load=replace(case.load, replicas=replicas)))

    return change


def with_one_run(case: Case) -> Case:
    """Requests come exactly when the record says."""
    return replace(case, load=replace(case.load, phases=1)) if isinstance(case.load, OpenLoop) else case


def with_poisson_arrivals(case: Case) -> Case:
    """Arrivals of an open loop at random, at the same mean rate."""
    if not isinstance(case.load, OpenLoop):
        return case
    times = case.load.arrival_s
    rate_per_s = (len(times) - 1) / float(times[-1] - times[0])
    drawn = arrivals.poisson(np.random.default_rng(SEED), rate_per_s, len(times))
    return replace(case, load=replace(case.load, arrival_s=drawn))


def without_prefix_cache(case: Case) -> Case:
    """No prompt is found in a cache."""
    return replace(case, load=replace(case.load, conversation=None)) if isinstance(case.load, OpenLoop) else case


def with_cached_prefix(share: float) -> Change:
    """This share of every prompt is found in a prefix cache: only the rest is computed."""

    def change(case: Case) -> Case:
        if isinstance(case.load, ClosedLoop):
            rest_of_one = max(1, int(case.load.prompt_tokens * (1 - share)))
            return replace(case, load=replace(case.load, prompt_tokens=rest_of_one))
        if not isinstance(case.load, OpenLoop):
            return case
        rest = np.maximum(1, (case.load.prompt_tokens * (1 - share)).astype(np.int64))
        return replace(case, load=replace(case.load, prompt_tokens=rest))

    return change
