"""The slowest requests of each cell, each with its story: what it waited for, when its first and its last token came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fineserve_sim.experiment.show.labels import number
from fineserve_sim.experiment.show.page.html import Html, joined, tag
from fineserve_sim.experiment.show.timelines.life import Life, lives_of
from fineserve_sim.experiment.show.timelines.stored import StoredRun

LOG_BYTES = 40_000_000
"""A longer decision log is left unread: its run's stories are shorter then, and ``explain`` tells the rest."""


def slowest(run: StoredRun, count: int) -> list[int]:
    """Measured requests with a first token, those first that were latest for their TTFT limit."""
    data = run.data
    limits_s = np.array([run.ttft_slo_s[name] for name in data.models])[data.model]
    ratio = np.where(data.measured & np.isfinite(data.ttft_s), data.ttft_s / limits_s, -1.0)
    latest = np.argsort(-ratio, kind="stable")[:count]
    return [int(request) for request in latest if ratio[request] >= 0]


def stories(run: StoredRun, cell: Mapping[str, Any], place: int, count: int) -> Html:
    """One element a request that opens into its story, with what the page filters by."""
    log = run.decisions_path
    known = log.is_file() and log.stat().st_size <= LOG_BYTES
    lives = lives_of(run, slowest(run, count), run.decisions() if known else ())
    told = (
        tag(
            "details",
            tag("summary", *_headline(run, cell, life)),
            tag("ol", *(tag("li", tag("b", f"+{moment.after_s:.3f} s"), f" {moment.what}") for moment in life.moments)),
            _waits(life),
            data_system=cell["system"],
            data_model=life.model,
            data_place=place,
        )
        for life in lives
    )
    return joined(told)


def _headline(run: StoredRun, cell: Mapping[str, Any], life: Life) -> list[Html]:
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
    factor = (first_s - arrival_s) / run.ttft_slo_s[life.model]
    return [
        tag("b", f"{factor:.2g} × limit"),
        Html(" "),
        tag("span", f"{cell['title']}, {life.model}, request {request}: " + ", ".join(texts)),
    ]


def _waits(life: Life) -> Html:
    if not life.waited_s:
        return Html("")
    waits = "; ".join(f"{seconds:.3f} s for {what}" for what, seconds in life.waited_s.items())
    return tag("p", f"It waited {waits}.")
