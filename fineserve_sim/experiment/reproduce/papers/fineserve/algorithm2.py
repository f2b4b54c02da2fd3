"""Algorithm 2 of FineServe on random waiting sets."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from fineserve_sim.experiment.reproduce.judge import Evaluation, holds
from fineserve_sim.experiment.reproduce.registry import claim
from fineserve_sim.policy.interfaces import EngineState, Request
from fineserve_sim.policy.scheduling.adaptive import AdaptiveBatching
from fineserve_sim.policy.scheduling.moore_hodgson import moore_hodgson

SETS = 300
"""Random waiting sets on which Algorithm 2 is checked."""

NOW_S, SLO_S, PREFILL_TOKENS_PER_S, STEP_S = 10.0, 1.0, 40_000.0, 0.01
"""A model of the sets: prompts of up to 8,192 tokens, a prefill rate near that of an 8B model on an H100, host time a batch."""


def _prefill_s(tokens: int, decoding: int = 0, pairs: int = 0) -> float:
    return STEP_S + tokens / PREFILL_TOKENS_PER_S if tokens else 0.0


def _waiting_sets() -> Iterator[tuple[float, list[Request]]]:
    """(now, requests that have waited for up to the SLO), drawn anew for each set from one seed."""
    draw = random.Random(0)
    for _ in range(SETS):
        arrivals_s = [NOW_S - draw.uniform(0, SLO_S) for _ in range(draw.randint(1, 40))]
        yield (
            NOW_S,
            [Request(id, "m", arrival_s, _prompt_tokens(draw)) for id, arrival_s in enumerate(arrivals_s)],
        )


def _prompt_tokens(draw: random.Random) -> int:
    return min(8192, 1 + int(draw.lognormvariate(6, 1.2)))


def _adaptive(now: float, requests: Sequence[Request]) -> tuple[list[Request], list[Request], list[Request]]:
    """(admitted, dropped, dropped by a second call) of Algorithm 2 on an idle engine with room for all."""
    scheduler = AdaptiveBatching(SLO_S, _prefill_s)
    for request in requests:
        scheduler.add(request, 0)
    state = {0: EngineState(0, 0, 0, len(requests), 10**9, 1.0)}
    first = scheduler.schedule(now, state)
    return first.admitted, first.dropped, scheduler.schedule(now, state).dropped


@claim("FS-alg2-anchor", by="policy core")
def anchor() -> Evaluation:
    """Every admitted batch ends before its earliest deadline. A request that is hopeless alone is dropped, and once."""
    broken = 0
    for now, requests in _waiting_sets():
        admitted, dropped, again = _adaptive(now, requests)
        finish_s = now + _prefill_s(sum(request.prompt_tokens for request in admitted))
        hopeless = {r.id for r in requests if now + _prefill_s(r.prompt_tokens) >= r.arrival_s + SLO_S}
        late = admitted and finish_s >= min(request.arrival_s for request in admitted) + SLO_S
        broken += bool(late or {request.id for request in dropped} != hopeless or again)
    return holds(not broken, f"{SETS} random waiting sets of up to 40 requests, {broken} against it.")


@claim("FS-alg2-vs-mh", by="policy core")
def batch_misses() -> Evaluation:
    """Admitted requests that miss their deadline when the selection runs as one chunked-prefill batch."""
    misses = {"Moore-Hodgson": 0, "Algorithm 2": 0}
    reversed_ = 0
    for now, requests in _waiting_sets():
        chosen: Mapping[str, Sequence[Request]] = {
            "Moore-Hodgson": _moore_hodgson(now, requests),
            "Algorithm 2": _adaptive(now, requests)[0],
        }
        late = {name: _late_in_batch(now, batch) for name, batch in chosen.items()}
        reversed_ += late["Moore-Hodgson"] < late["Algorithm 2"]
        for name, count in late.items():
            misses[name] += count
    listed = ", ".join(f"{name} {count}" for name, count in misses.items())
    return holds(
        not reversed_ and misses["Moore-Hodgson"] > misses["Algorithm 2"],
        f"Late requests among the admitted of {SETS} random waiting sets: {listed}; {reversed_} sets the other way round.",
    )


def _moore_hodgson(now: float, requests: Sequence[Request]) -> list[Request]:
    """The requests that are on time when served one after the other, in deadline order."""
    ordered = sorted(requests, key=lambda request: (request.arrival_s, request.id))
    jobs = ((request.arrival_s + SLO_S, _prefill_s(request.prompt_tokens)) for request in ordered)
    return [ordered[index] for index in moore_hodgson(jobs, now).on_time]


def _late_in_batch(now: float, batch: Sequence[Request]) -> int:
    finish_s = now + _prefill_s(sum(request.prompt_tokens for request in batch))
    return sum(finish_s > request.arrival_s + SLO_S for request in batch)
