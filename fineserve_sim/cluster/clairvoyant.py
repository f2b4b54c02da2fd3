"""The run of a system whose scheduler is ``clairvoyant``: not a simulation but a bound on one.

It bounds the TTFT attainment of every scheduler, KV memory and placement, and of models that come and go. It needs that no
prefix is reused and that no GPU hosts two engines of one model. With ``engines: placed`` it holds for as many engines as the
system's own placement gives, wherever they are. The bound leaves out only causes of delay: decodes, memory and its limits, the
other models on the GPUs, loading, and the choice among a model's engines. The bound keeps these facts:

* An engine does one step at a time, and a step with c prompt tokens takes at least base(c), the time of all operators but
  attention. So each prompt token takes at least rho = min over c <= budget of base(c) / c, however it is batched. A request of
  p tokens is on time only if p rho seconds of its model's engines lie between its arrival and its deadline.
* k engines do no more than one machine that is k times as fast; ``most_on_time`` then finds the largest set that it ends.
  Engines on several kinds of GPU add up their rates.
* The prompt of one request takes ceil(p / budget) steps at least, and p rho seconds, on however many engines.

Requests that are put aside are dropped at their arrival. True output lengths enter here and nowhere else: the others go on
decoding as if each had an engine to itself.

One machine prefills request after request. Request j may start at its arrival r_j and takes p_j seconds; it is on time if it
ends by its deadline d_j (1 | r_j | sum U_j). The problem is easy where deadlines come in the order of arrivals, as for the
requests of one model with one SLO. A later request is then never more urgent, so serving in that order is optimal for any set
of requests that can be on time at all. The largest set comes from taking requests in that order. Whenever the one just taken
would end late, the one without which the rest ends soonest is put aside (Kise, Ibaraki and Mine, Operations Research 26(1),
1978). With equal arrivals this is Moore and Hodgson's rule: the longest goes.

Without request i the end moves forward by min(p_i, min over later k of start_k - r_k). That is its duration, or less where a
later request arrives too late to start so much sooner.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from fineserve_sim.catalog import GpuSpec
from fineserve_sim.cluster.compose.facts import demands_of
from fineserve_sim.cluster.compose.memory import caches_prefixes, legacy_kernel
from fineserve_sim.cluster.compose.place import place
from fineserve_sim.cluster.compose.profiling import step_model
from fineserve_sim.cluster.run import WholeTrace
from fineserve_sim.cluster.samples import Samples
from fineserve_sim.cluster.scenario import Cause, Fate, RunResult, Scenario, ScenarioError, ServedModel
from fineserve_sim.latency import StepModel
from fineserve_sim.systems.spec import ClairvoyantSpec

ROUNDING = 1 - 1e-9
"""Simulated times are sums of steps; a bound must not exceed one by a last bit."""


def simulate_clairvoyant(scenario: Scenario) -> RunResult:
    """The bound as a result: first tokens at the earliest times of the relaxed machines.

    Only the number of requests on time is a bound. Single times and all other metrics describe one optimistic schedule.
    There are no decisions to log and no samples. Raises ScenarioError for systems that are not bounded, and as ``place``.
    """
    system = scenario.system
    assert isinstance(system.scheduler, ClairvoyantSpec)
    if system.residency is not None or caches_prefixes(system.memory):
        raise ScenarioError(f"system {system.name}: clairvoyant takes no residency and no prefix cache; leave them out")
    if scenario.clients is not None:
        raise ScenarioError(
            f"system {system.name}: clairvoyant needs to know all arrivals; clients send by the answers"
        )
    placement, _ = place(scenario, demands_of(scenario))
    spec_of = {gpu.id: gpu.spec for gpu in scenario.gpus}
    placed = Counter((instance.model, spec_of[instance.gpus[0]]) for instance in placement.instances)
    there = Counter(spec_of.values())
    arrival_s = scenario.whole_trace.arrival_s
    whole = WholeTrace(len(arrival_s))
    for served in scenario.models:
        engines = {spec: placed[served.id, spec] for spec in there}
        if system.scheduler.engines == "everywhere":
            engines = {spec: max(engines[spec], count // served.tp) for spec, count in there.items()}
        _serve(scenario, served, engines, whole)
    return RunResult(
        **whole.columns,
        placement=placement,
        kv_capacity_bytes=(),
        timeline=Samples((), 0).timeline(),
        end_s=float(np.fmax.reduce(whole.finish_s, initial=arrival_s.max(initial=0.0))),
        iterations=0,
        events=0,
        loop_cpu_s=0.0,
    )


def _serve(scenario: Scenario, served: ServedModel, engines_on: Mapping[GpuSpec, int], whole: WholeTrace) -> None:
    """Write the outcomes of one model's requests to ``whole``; requests on time decode for their true lengths. Engines on
    several kinds of GPU count as engines of the fastest kind: as many as prefill as much."""
    trace, budget, longest = scenario.whole_trace, scenario.engine.token_budget, served.model.max_context_tokens
    kernel = legacy_kernel(scenario.system.memory)
    used = [spec for spec, count in engines_on.items() if count] or [*engines_on][:1]
    steps = {spec: step_model(served, spec, scenario.engine, kernel) for spec in used}
    # Measured steps may not grow with their tokens. Then a token costs nothing, and GPUs are equally fast.
    token_s = {spec: max(least_token_s(step, budget), sys.float_info.min) for spec, step in steps.items()}
    fastest = min(used, key=lambda spec: token_s[spec])
    step, engines = steps[fastest], sum(engines_on[spec] * (token_s[fastest] / token_s[spec]) for spec in used)
    step_s = min(least_step_s(step) for step in steps.values())
    requests = np.flatnonzero(np.array([model == served.id for model in trace.models])[trace.model])
    prompt_tokens, arrival_s = trace.prompt_tokens[requests], trace.arrival_s[requests]
    prefill_s = prompt_tokens * token_s[fastest]
    latency_s = np.maximum(prefill_s, np.ceil(prompt_tokens / budget) * step_s)
    fits = (prompt_tokens < longest) & (engines > 0)
    able = fits & (latency_s <= served.ttft_slo_s)
    whole.fate[requests] = np.where(fits, Fate.DROPPED, Fate.REJECTED)
    refused = Cause.CONTEXT if engines else Cause.PLACEMENT
    whole.cause[requests] = np.where(fits, Cause.DEADLINE, refused)
    deadline_s, earliest_s = arrival_s + served.ttft_slo_s, arrival_s + latency_s
    columns = (arrival_s[able], deadline_s[able], prefill_s[able] / engines)
    ends_s = most_on_time(map(Foreseen, *(column.tolist() for column in columns)))
    for request, prompt, least_s, end_s in zip(
        requests[able].tolist(), prompt_tokens[able].tolist(), earliest_s[able].tolist(), ends_s, strict=True
    ):
        if end_s is None:
            continue
        first_token_s = max(end_s, least_s)
        asked = int(trace.output_tokens[request])
        output = min(asked, longest - prompt)
        tokens_s = step.decode_ends_s(first_token_s, 1, prompt, output - 1, 1.0) if output > 1 else [first_token_s]
        whole.first_token_s[request], whole.finish_s[request] = first_token_s, tokens_s[-1]
        cut = output < asked
        whole.fate[request], whole.cause[request] = (Fate.CUT, Cause.CONTEXT) if cut else (Fate.FINISHED, Cause.NONE)
        whole.generated_tokens[request] = output


def least_step_s(step: StepModel, tokens: int = 1) -> float:
    """The least seconds of a step with so many prompt tokens: without their attention, which depends on how requests share the
    tokens."""
    _, attention_s = step.attention_s(0, 0, tokens, tokens, 0)
    whole_s = step.step_s(0, 0, tokens, tokens, 0, 0) - attention_s
    return max(whole_s, step.overhead_s + step.floor_s) * ROUNDING


def least_token_s(step: StepModel, token_budget: int) -> float:
    """The least engine seconds of a prompt token, over steps of 1 to ``token_budget`` tokens."""
    return min(least_step_s(step, tokens) / tokens for tokens in range(1, token_budget + 1))


class Foreseen(NamedTuple):
    """A request with its future: when it comes, by when its prefill must end, and the machine's seconds for that."""

    arrival_s: float
    deadline_s: float
    prefill_s: float


def most_on_time(requests: Iterable[Foreseen]) -> list[float | None]:
    """When each request ends in a schedule with as many on time as possible; None: it is put aside.

    A request that ends at its deadline is on time. Needs arrivals and deadlines in ascending order, else raises ValueError.
    The time is quadratic in the number of requests between two moments at which none waits.
    """
    ends: list[float | None] = []
    kept: list[_Kept] = []
    previous = None
    for index, request in enumerate(requests):
        if previous and (request.arrival_s < previous.arrival_s or request.deadline_s < previous.deadline_s):
            raise ValueError(
                f"request {index} has an earlier arrival or deadline than the one before: sort them by both"
            )
        previous = request
        if kept and kept[-1].end_s <= request.arrival_s:  # nothing before this can delay anything from here on
            kept = []
        ends.append(_append(kept, index, request))
        if kept[-1].end_s > request.deadline_s:
            _put_one_aside(kept, ends)
    return ends


class _Kept(NamedTuple):
    number: int
    request: Foreseen
    start_s: float
    end_s: float


def _append(kept: list[_Kept], number: int, request: Foreseen) -> float:
    """Serve the request after those kept. Returns when it ends."""
    start_s = max(request.arrival_s, kept[-1].end_s) if kept else request.arrival_s
    kept.append(_Kept(number, request, start_s, start_s + request.prefill_s))
    return kept[-1].end_s


def _put_one_aside(kept: list[_Kept], ends: list[float | None]) -> None:
    """Remove the request without which the rest ends soonest (the last of equals), and let those behind it start sooner."""
    best = len(kept) - 1
    gain_s = kept[-1].end_s - (kept[-2].end_s if best else 0.0)
    movable_s = kept[-1].start_s - kept[-1].request.arrival_s
    for at in range(best - 1, -1, -1):
        if movable_s <= gain_s:
            break
        here = kept[at]
        if min(here.request.prefill_s, movable_s) > gain_s:
            gain_s, best = min(here.request.prefill_s, movable_s), at
        movable_s = min(movable_s, here.start_s - here.request.arrival_s)
    gone, *behind = kept[best:]
    del kept[best:]
    ends[gone.number] = None
    for later in behind:
        ends[later.number] = _append(kept, later.number, later.request)
