"""The metrics that figures and claims may name (``results.metrics`` says what each is)."""

from __future__ import annotations

from fineserve_sim.cluster.scenario import COUNTERS, WAKES

PERCENTILES = (50, 90, 95, 99, 99.9)
ATTAINMENTS = ("ttft_attainment", "tpot_attainment", "e2e_attainment", "slo_attainment")
EACH = "each_"
"""Before the name of an attainment: that of the model that attains least of its own requests."""

PER_MODEL = (
    "goodput_per_s",
    "throughput_per_s",
    "decode_throughput_tokens_per_s",
    "token_throughput_per_s",
    *(f"{moment}_p{percent}_s" for moment in ("ttft", "tpot", "e2e") for percent in PERCENTILES),
    *(f"{moment}_mean_s" for moment in ("ttft", "tpot", "e2e")),
    "arrival_rate_per_s",
    "waiting_mean",
    "waiting_max",
    "kv_used_peak_bytes",
)
CLUSTER_WIDE = (
    "kv_use_mean",
    "kv_use_peak",
    "gpu_hours_per_mtoken",
    "gpu_hours_per_1000_within",
    *COUNTERS,
    *WAKES.values(),
)
METRICS = (*ATTAINMENTS, *PER_MODEL, *CLUSTER_WIDE)


def overall(metric: str) -> str:
    """The attainment over all requests that an attainment of the worst model is made of; others as they are."""
    return metric.removeprefix(EACH)
