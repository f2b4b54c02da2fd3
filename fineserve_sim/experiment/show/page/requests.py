"""Misses of each cell, some of every cause, and its slowest requests, each with its story: what it waited for, when its first
and its last token came."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import numpy as np

from fineserve_sim.experiment.results import misses
from fineserve_sim.experiment.show.answer import MEANINGS
from fineserve_sim.experiment.show.labels import number
from fineserve_sim.experiment.show.page.html import Html, joined, tag
from fineserve_sim.experiment.show.timelines.life import Life, lives_of
from fineserve_sim.experiment.show.timelines.stored import StoredRun

LOG_BYTES = 40_000_000
"""A longer decision log is left unread: its run's stories are shorter then, and ``explain`` tells the rest."""


def worth_telling(run: StoredRun, count: int) -> dict[int, str]:
    """Measured requests with the cause of their miss: in turns of every cause, the most frequent first, and of each cause the
    latest for their TTFT limit first. Where there are fewer misses, the slowest of the others follow, without a cause."""
    data = run.data
    limits_s = np.array([run.ttft_slo_s[name] for name in data.models])[data.model]
    ratio = np.where(np.isfinite(data.ttft_s), data.ttft_s / limits_s, 0.0)
    judged = data.accepting_cuts() if run.limits.accept_cut else data
    hits = misses.met(judged, run.limits)
    codes = np.where(data.measured, misses.causes(judged, hits, run.unplaced, run.limits.reach_tokens), -1)
    latest = np.argsort(-ratio, kind="stable")
    by_cause = [latest[codes[latest] == code] for code in range(1, len(misses.CAUSES) + 1)]
    turns = zip_longest(*sorted((found.tolist() for found in by_cause if len(found)), key=len, reverse=True))
    missed = [request for turn in turns for request in turn if request is not None]
    others = [request for request in latest[codes[latest] == 0].tolist() if ratio[request] > 0]
    told = [*missed, *others][:count]
    return {request: misses.CAUSES[codes[request] - 1] if codes[request] else "" for request in told}


def stories(run: StoredRun, cell: Mapping[str, Any], place: int, count: int) -> Html:
    """One element a request that opens into its story, with what the page filters by."""
    log = run.decisions_path
    known = log.is_file() and log.stat().st_size <= LOG_BYTES
    causes = worth_telling(run, count)
    lives = lives_of(run, list(causes), run.decisions() if known else ())
    told = (
        tag(
            "details",
            tag("summary", *_headline(run, cell, life, causes[life.request])),
            tag("ol", *(tag("li", tag("b", f"+{moment.after_s:.3f} s"), f" {moment.what}") for moment in life.moments)),
            _waits(life),
            data_system=cell["system"],
            data_model=life.model,
            data_place=place,
        )
        for life in lives
    )
    return joined(told)


def _headline(run: StoredRun, cell: Mapping[str, Any], life: Life, cause: str) -> list[Html]:
    data, request = run.data, life.request
    arrival_s, first_s, finish_s = (
        float(column[request]) for column in (data.arrival_s, data.first_token_s, data.finish_s)
    )
    texts = [f"{number(life.prompt_tokens)} + {number(life.output_tokens)} tokens", life.verdict]
    if np.isfinite(data.tpot_s[request]):
        texts.append(f"TPOT {1000 * data.tpot_s[request]:.3g} ms")
    if np.isfinite(finish_s):
        texts.append(f"end after {finish_s - arrival_s:.3g} s")
    if data.preemptions[request]:
        texts.append(f"preempted {data.preemptions[request]} times")
    factor = f"{(first_s - arrival_s) / run.ttft_slo_s[life.model]:.2g} × limit" if np.isfinite(first_s) else ""
    return [
        tag("b", ", ".join(filter(None, [MEANINGS.get(cause, ""), factor]))),
        Html(" "),
        tag("span", f"{cell['title']}, {life.model}, request {request}: " + ", ".join(texts)),
    ]


def _waits(life: Life) -> Html:
    if life.first_s:
        spent = "; ".join(f"{seconds:.3f} s {what}" for what, seconds in life.first_s.items())
        return tag("p", f"To its first token: {spent}.")
    if not life.waited_s:
        return Html("")
    waits = "; ".join(f"{seconds:.3f} s for {what}" for what, seconds in life.waited_s.items())
    return tag("p", f"It waited {waits}.")
