"""The run of a system whose scheduler is ``clairvoyant``: not a simulation but a bound on one.

It bounds the TTFT attainment of every scheduler, KV memory and placement, and of models that come and go, as long as no prefix
is reused and no GPU hosts two engines of one model (``engines: placed``: for as many engines as the system's own placement
gives, wherever they are). What is left out only ever costs time: decodes, memory and its limits, the other models on the
GPUs, loading, and which of a model's engines a request goes to. What is left in:

* An engine does one step at a time, and a step with c prompt tokens takes at least base(c), what all operators but attention
  take. So each prompt token takes at least rho = min over c <= budget of base(c) / c, however it is batched, and a request
  of p tokens is on time only if p rho seconds of its model's engines lie between its arrival and its deadline.
* k engines do no more than one machine that is k times as fast; ``most_on_time`` then finds the largest set that it ends.
* The prompt of one request takes ceil(p / budget) steps at least, and p rho seconds, on however many engines.

Those put aside are dropped at their arrival. True output lengths enter here and nowhere else: the others go on decoding as if
each had an engine to itself.
"""

from __future__ import annotations

from collections import Counter
from math import ceil

import numpy as np
from fineserve_traces import Trace

from fineserve_sim.cluster.compose.instances import place
from fineserve_sim.cluster.compose.memory import caches_prefixes, legacy_kernel
from fineserve_sim.cluster.compose.profiling import step_model
from fineserve_sim.cluster.outcomes import Outcomes
from fineserve_sim.cluster.result import WholeTrace
from fineserve_sim.cluster.samples import Samples
from fineserve_sim.cluster.scenario import Fate, RunResult, Scenario, ScenarioError, ServedModel
from fineserve_sim.latency import StepModel
from fineserve_sim.policy.scheduling.clairvoyant import Foreseen, most_on_time
from fineserve_sim.systems.spec import ClairvoyantSpec

ROUNDING = 1 - 1e-9
"""Simulated times are sums of steps; a bound must not exceed one by a last bit."""


def simulate_clairvoyant(scenario: Scenario) -> RunResult:
    """The bound as a result: first tokens at the earliest times of the relaxed machines.

    Only the number of requests on time is a bound; single times, and all other metrics, are those of one optimistic schedule.
    There are no decisions to log and no samples. Raises ScenarioError for systems that are not bounded, and as ``compose``.
    """
    system = scenario.system
    assert isinstance(system.scheduler, ClairvoyantSpec)
    if system.residency is not None or caches_prefixes(system.memory):
        raise ScenarioError(f"system {system.name}: clairvoyant takes no residency and no prefix cache; leave them out")
    placement, _ = place(scenario)
    placed = Counter(instance.model for instance in placement.instances)
    trace = scenario.whole_trace
    outcomes, whole = Outcomes(), WholeTrace(len(trace))
    outcomes.begin(len(trace), whole)
    for index in range(len(trace)):
        outcomes.arrive(index)
    for served in scenario.models:
        everywhere = len(scenario.gpus) // served.tp if system.scheduler.engines == "everywhere" else 0
        _serve(scenario, served, max(placed[served.id], everywhere), outcomes)
    outcomes.close()
    return RunResult(
        **whole.columns(),
        placement=placement,
        kv_capacity_bytes=(),
        timeline=Samples((), 0).timeline(),
        end_s=outcomes.last_end_s,
        iterations=0,
        events=0,
        loop_cpu_s=0.0,
    )


def _serve(scenario: Scenario, served: ServedModel, engines: int, outcomes: Outcomes) -> None:
    """What becomes of the requests of one model."""
    trace, budget = scenario.whole_trace, scenario.engine.token_budget
    step = step_model(served, scenario.gpus[0].spec, scenario.engine, legacy_kernel(scenario.system.memory))
    least_s, token_s = least_step_s(step), least_token_s(step, budget)
    able: list[int] = []
    foreseen: list[Foreseen] = []
    latest: dict[int, float] = {}
    for index in _requests_of(trace, served.id):
        arrival_s, prompt = float(trace.arrival_s[index]), int(trace.prompt_tokens[index])
        latency_s = max(prompt * token_s, ceil(prompt / budget) * least_s)
        if not engines or prompt >= served.model.max_context_tokens:
            outcomes.end(index, arrival_s, Fate.REJECTED)
        elif latency_s > served.ttft_slo_s:
            outcomes.end(index, arrival_s, Fate.DROPPED)
        else:
            able.append(index)
            foreseen.append(Foreseen(arrival_s, arrival_s + served.ttft_slo_s, prompt * token_s / engines))
            latest[index] = arrival_s + latency_s
    for index, end_s in zip(able, most_on_time(foreseen), strict=True):
        if end_s is None:
            outcomes.end(index, float(trace.arrival_s[index]), Fate.DROPPED)
        else:
            _finish(scenario, served, step, outcomes, index, max(end_s, latest[index]))


def _finish(
    scenario: Scenario, served: ServedModel, step: StepModel, outcomes: Outcomes, index: int, first_token_s: float
) -> None:
    """A request has its first token; the others follow as if it had an engine to itself, which needs its true length."""
    trace = scenario.whole_trace
    prompt = int(trace.prompt_tokens[index])
    output = min(int(trace.output_tokens[index]), served.model.max_context_tokens - prompt)
    ends_s = step.decode_ends_s(first_token_s, 1, prompt, output - 1, 1.0) if output > 1 else [first_token_s]
    outcomes.first_token(index, first_token_s)
    outcomes.end(index, ends_s[-1], Fate.FINISHED, output)


def _requests_of(trace: Trace, model: str) -> list[int]:
    return np.flatnonzero(trace.model == trace.models.index(model)).tolist() if model in trace.models else []


def least_step_s(step: StepModel) -> float:
    """No step with prompt tokens takes less."""
    return _base_s(step, 1)


def least_token_s(step: StepModel, token_budget: int) -> float:
    """Seconds of an engine that a prompt token takes at least, in whatever step of up to ``token_budget`` tokens."""
    return min(_base_s(step, tokens) / tokens for tokens in range(1, token_budget + 1))


def _base_s(step: StepModel, tokens: int) -> float:
    """A step of ``tokens`` prompt tokens without its attention, which depends on how they belong together."""
    _, attention_s = step.attention_s(0, 0, tokens, tokens, 0)
    whole_s = step.step_s(0, 0, tokens, tokens, 0, 0) - attention_s
    return max(whole_s, step.overhead_s + step.floor_s) * ROUNDING
