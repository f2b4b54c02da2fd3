"""Many-model workloads after the traces of Prism (arXiv 2505.04021, section 3.1), which are not public.

The paper describes its traces by four observations. Three of them fix the generators here:

* C1, popularity: about 60 % of the models make 25 % of the requests, in all traces. Shares follow Zipf's law with the
  exponent for which this is so.
* C2, idle periods: half of the models of a provider (Hyperbolic, Novita) have more than 40 idle intervals over 10 s per hour,
  some more than 100. Many have a median idle time over 30 s. In Chatbot Arena, more than half have one over 80 s.
* C3, fluctuation: the requests per minute of many models have a coefficient of variation above 1 (providers) or 0.5 (Arena).

Each model is an on/off process (``onoff.py``), whose idle times and variation are known in closed form. Two numbers are free
for each kind of trace, and stand below with what they follow from. The duty cycles are spread evenly over their range, in a
fixed order that mixes popular and rare models. C4, the diversity of SLOs, is no property of the arrivals.

Prompts and outputs of the Arena workload come from a sketch of the public Arena trace, 1,500 requests to 27 models
(``data/arena_27models.json``, made by ``traces/build_arena_sketch.py``). The provider's come from ShareGPT's first turns,
since nothing is known of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from fineserve_traces.lengths import LengthPairs, LengthSource, generate, length_source
from fineserve_traces.onoff import OnOff
from fineserve_traces.readers import read_trace
from fineserve_traces.schema import FloatArray, Trace, TraceError, merge
from fineserve_traces.sketch import sketch_document, sketch_from_document

TAIL_MODELS, TAIL_REQUESTS = 0.6, 0.25
"""C1: this part of the models makes that part of the requests."""


@dataclass(frozen=True, slots=True)
class Kind:
    """``per_hour``: requests of a model on average; ``duties``: least and largest duty cycle; ``on_s``: mean time on."""

    per_hour: float
    duties: tuple[float, float]
    on_s: float


PROVIDER = Kind(per_hour=130.0, duties=(0.1, 1.0), on_s=60.0)
"""With a mean of 130 per hour the median model of 24 has 40 idle intervals per hour (C2). Duty cycles from a tenth to always
on, a minute at a time, make some models bursty and others steady (C3)."""

ARENA = Kind(per_hour=30.0, duties=(0.3, 1.0), on_s=60.0)
"""With a mean of 30 per hour more than half of the models have a median idle time over 80 s (C2). Less bursty (C3)."""

_GOLDEN = (math.sqrt(5) - 1) / 2


def tail_shares(models: int, tail_models: float = TAIL_MODELS, tail_requests: float = TAIL_REQUESTS) -> FloatArray:
    """Zipf shares of ``models`` models, largest first, of which the last ``tail_models`` (a fraction, rounded to whole models)
    together make ``tail_requests``. Raises ValueError if no exponent >= 0 does."""
    tail = round(tail_models * models)
    if not (0 < tail < models and 0 < tail_requests <= tail / models):
        raise ValueError(
            f"the last {tail} of {models} models cannot make {tail_requests} of the requests by Zipf's law"
        )

    def shares(exponent: float) -> FloatArray:
        weights: FloatArray = np.arange(1, models + 1, dtype=np.float64) ** -exponent
        return weights / float(weights.sum())

    low, high = 0.0, 64.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if shares(middle)[-tail:].sum() > tail_requests else (low, middle)
    return shares(high)


def processes(kind: Kind, models: int) -> list[OnOff]:
    """The arrival process of each model, the most popular first. Duty cycles follow the golden-ratio sequence, which covers
    its range evenly for any number of models."""
    least, largest = kind.duties
    duties = [least + (largest - least) * ((rank + 1) * _GOLDEN % 1.0) for rank in range(models)]
    rates = tail_shares(models) * models * kind.per_hour / 3600
    return [OnOff(float(rate), duty, kind.on_s) for rate, duty in zip(rates, duties, strict=True)]


def provider_trace(
    rng: Generator, models: Sequence[str], duration_s: float, *, scale: float = 1.0, lengths: LengthSource | None = None
) -> Trace:
    """A trace like Hyperbolic's for these models, the most popular first. ``scale`` multiplies the requests of every model
    and keeps its times on and off, as Prism's experiments do. Raises TraceError when no request comes."""
    return _trace(rng, PROVIDER, models, duration_s, scale, lengths or length_source("sharegpt_v3_first_turn"))


def arena_trace(
    rng: Generator, models: Sequence[str], duration_s: float, *, scale: float = 1.0, lengths: LengthSource | None = None
) -> Trace:
    """A trace like Arena-Chat for these models, the most popular first; see ``provider_trace``."""
    return _trace(rng, ARENA, models, duration_s, scale, lengths or arena_lengths())


def _trace(
    rng: Generator, kind: Kind, models: Sequence[str], duration_s: float, scale: float, lengths: LengthSource
) -> Trace:
    parts = []
    for name, process in zip(models, processes(kind, len(models)), strict=True):
        arrival_s = process.arrivals(rng, duration_s, scale)
        if arrival_s.size:
            parts.append(generate(arrival_s, lengths, rng, name))
    if not parts:
        raise TraceError(f"no request comes to {len(models)} models in {duration_s:g} s; make it longer or scale it up")
    return merge(parts)


def arena_27models(rng: Generator, data_dir: str | Path | None = None) -> Trace:
    """The public Arena trace: 1,500 requests to 27 models in 600 s, on a clock that its authors compressed. The real one from
    ``data_dir`` (its file in ``traces/`` or there), else redrawn from the sketch: as many requests of each model in each
    minute, uniform within it, with lengths from the joint quantiles. Raises TraceError when ``data_dir`` does not hold the
    file.
    """
    document = _arena_document()
    if data_dir is not None:
        places = [Path(data_dir) / "traces" / document["file"], Path(data_dir) / document["file"]]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise TraceError(f"arena_27models: neither {places[0]} nor {places[1]} is there")
        return read_trace(found)
    lengths = sketch_from_document(document)
    parts = []
    for name, minutes in zip(document["models"], document["requests_per_minute"], strict=True):
        starts = np.repeat(np.arange(len(minutes)) * 60.0, minutes)
        parts.append(generate(np.sort(starts + rng.random(starts.size) * 60.0), lengths, rng, name))
    return merge(parts)


def arena_lengths(data_dir: str | Path | None = None) -> LengthSource:
    """Prompt and output lengths of the public Arena trace; ``data_dir`` and TraceError as in ``arena_27models``."""
    if data_dir is None:
        return sketch_from_document(_arena_document())
    real = arena_27models(np.random.default_rng(0), data_dir)
    return LengthPairs(real.prompt_tokens, real.output_tokens, real.source)


def _arena_document() -> dict[str, Any]:
    return sketch_document("arena_27models")
