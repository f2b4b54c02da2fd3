"""Small fleets: a few models of 1B under a residency policy, on GPUs that hold some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simkit import H100, Row, fixed_bytes, geometry, served, trace_of, with_usable_bytes

from fineserve_sim.cluster import EngineSettings, Gpu, Scenario
from fineserve_sim.systems import SystemSpec

PRISM: dict[str, Any] = {"policy": "prism", "idle_s": 3.0, "replace_s": 2.0, "min_stay_s": 2.0}
STAYS: dict[str, Any] = {"policy": "prism", "evict": False, "move": False}
"""A fleet that nobody leaves and in which nobody moves."""
QLM: dict[str, Any] = {"policy": "qlm", "swap_s": 2.0}


def fleet(
    rows: Sequence[Row],
    residency: dict[str, Any] | None = None,
    *,
    models: int = 1,
    hosted: int | None = None,
    kv_tokens: int = 4096,
    cards: Sequence[Gpu] = (Gpu(0, 0, H100),),
    memory: dict[str, Any] | None = None,
    placement: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    settings: EngineSettings | None = None,
    slo_s: float = 2.0,
    rate_per_s: float = 0.5,
    **options: Any,
) -> Scenario:
    """``models`` of 1B on GPUs with memory for ``hosted`` of them (all, if not given) and ``kv_tokens`` of KV. Without
    ``residency`` it is the static cluster of the same placement. Every run checks its ledgers."""
    here = tuple(served(f"m{i}", slo_s=slo_s, rate_per_s=rate_per_s) for i in range(models))
    settings = settings or EngineSettings(token_budget=256, max_sequences=16)
    kv_bytes = kv_tokens * geometry(here[0], settings).token_bytes
    settings = with_usable_bytes(fixed_bytes(here[: hosted or models], settings) + kv_bytes, settings)
    qlm = residency is not None and residency["policy"] == "qlm"
    axes = {
        "placement": placement or {"policy": "dedicated" if qlm else "kvpr"},
        "scheduler": scheduler or {"policy": "fcfs"},
        "memory": memory or ({"policy": "private"} if qlm else {"policy": "kvcached", "mode": "contiguous"}),
        "residency": residency,
    }
    spec = SystemSpec.model_validate({"name": "fleet", "title": "Fleet", "summary": "For a test", **axes})
    trace = trace_of(rows, [model.id for model in here])
    return Scenario(spec, here, tuple(cards), trace, settings, **{"sample_s": 0.5, "check": True, **options})
