"""Traces of LLM requests: one columnar schema, readers of the public formats, generators, scaling, statistics.

trace = read_trace("azure2023_conv.csv.gz")
trace = generate(gamma(rng, rate_per_s=8, cv=2, n=10_000), length_source("sharegpt_v3_first_turn"), rng)
"""

from fineserve_traces.arrivals import gamma, piecewise, poisson, replay, scale_rate, weibull, weibull_shape
from fineserve_traces.drawn import Draw, Drawn
from fineserve_traces.intake import ROLES, UNITS_S, take_in
from fineserve_traces.lengths import (
    DATASETS,
    FITTED,
    ConstantLengths,
    LengthPairs,
    LengthSource,
    Lognormal,
    LognormalLengths,
    generate,
    length_source,
    read_lengths,
)
from fineserve_traces.prefixes import conversations
from fineserve_traces.provider_day import ProviderDay
from fineserve_traces.readers import read_trace
from fineserve_traces.scaling import upscale
from fineserve_traces.schema import Trace, TraceError, merge
from fineserve_traces.sketch import LengthSketch, sharegpt_sketch
from fineserve_traces.source import Requests, Totals, totals, whole
from fineserve_traces.stats import TokenStats, TraceStats, describe, prefix_hit_ratio
from fineserve_traces.trace_file import TraceFile, open_trace
from fineserve_traces.vllm_bench import BenchResult, read_vllm_bench

__all__ = [
    "DATASETS",
    "FITTED",
    "ROLES",
    "UNITS_S",
    "BenchResult",
    "ConstantLengths",
    "Draw",
    "Drawn",
    "LengthPairs",
    "LengthSketch",
    "LengthSource",
    "Lognormal",
    "LognormalLengths",
    "ProviderDay",
    "Requests",
    "TokenStats",
    "Totals",
    "Trace",
    "TraceError",
    "TraceFile",
    "TraceStats",
    "conversations",
    "describe",
    "gamma",
    "generate",
    "length_source",
    "merge",
    "open_trace",
    "piecewise",
    "poisson",
    "prefix_hit_ratio",
    "read_lengths",
    "read_trace",
    "read_vllm_bench",
    "replay",
    "scale_rate",
    "sharegpt_sketch",
    "take_in",
    "totals",
    "upscale",
    "weibull",
    "weibull_shape",
    "whole",
]
