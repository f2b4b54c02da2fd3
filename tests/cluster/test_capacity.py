"""Every request that fits an empty engine finishes; one that does not is rejected, and nobody waits behind it."""

from __future__ import annotations

from typing import Any

from fleetkit import STAYS, fleet
from hypothesis import given, settings
from hypothesis import strategies as st
from lawkit import bounded
from simkit import H100, Row

from fineserve_sim.cluster import EngineSettings, Fate, Gpu

NOMINAL = 4100
"""KV tokens by bytes: neither whole blocks nor whole pages."""

MEMORIES = [
    {"policy": "private"},
    *({"policy": "kvcached", "mode": mode} for mode in ("sync", "buffered", "contiguous")),
]
SCHEDULERS = [
    {"policy": "fcfs"},
    *({"policy": "moore_hodgson", "reserve": reserve} for reserve in ("fraction", "page")),
]


@settings(max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(NOMINAL - 1100, NOMINAL + 20), st.integers(0, 1)), min_size=1, max_size=8),
    behind=st.integers(0, 6),
    memory=st.sampled_from(MEMORIES),
    scheduler=st.sampled_from(SCHEDULERS),
    residency=st.sampled_from([STAYS, None]),
    models=st.integers(1, 2),
    slo_s=st.sampled_from([0.001, 1.0, 100.0]),
)
def test_what_fits_an_empty_engine_finishes(
    sizes: list[tuple[int, int]],
    behind: int,
    memory: dict[str, Any],
    scheduler: dict[str, Any],
    residency: dict[str, Any] | None,
    models: int,
    slo_s: float,
) -> None:
    prompts = [(tokens, model % models) for tokens, model in sizes] + [(500, 0)] * behind
    rows: list[Row] = [(0.01 * number, tokens, 1, model) for number, (tokens, model) in enumerate(prompts)]
    options: dict[str, Any] = {
        "models": models,
        "memory": memory,
        "kv_tokens": NOMINAL * (models if memory["policy"] == "private" else 1),
        "placement": {"policy": "pinned", "groups": {f"m{model}": [[0]] for model in range(models)}},
        "slo_s": slo_s,
        "drain_s": 60.0,
    }
    told = bounded(fleet(rows[:1], STAYS, **options)).log
    (held,) = (line["kv_tokens"] for line in told if line.get("event") == "EnginesResized")
    run = bounded(fleet(rows, residency, scheduler=scheduler, **options))
    fits = [tokens < held[str(model)] for tokens, model in prompts]
    assert run.result.fate.tolist() == [Fate.FINISHED if each else Fate.REJECTED for each in fits]


def test_a_waiting_prompt_that_no_longer_fits_starts_at_once_on_an_idle_engine_far_away() -> None:
    """A second model comes to its GPU while it waits for a slot; the other engine of its model has room."""
    cards = (Gpu(0, 0, H100), Gpu(1, 0, H100))
    rows: list[Row] = [(0.0, 64, 2000, 0), (0.0, 64, 2, 0), (0.1, 80_000, 2, 0), (0.3, 64, 8, 1)]
    run = bounded(
        fleet(
            rows,
            STAYS | {"tick_s": 30.0},
            models=2,
            hosted=2,
            kv_tokens=40_000,
            cards=cards,
            placement={"policy": "pinned", "groups": {"m0": [[0], [1]]}},
            scheduler={"policy": "moore_hodgson"},
            settings=EngineSettings(token_budget=256, max_sequences=1),
            drain_s=60.0,
        )
    ).result
    assert run.fate.tolist() == [Fate.FINISHED] * 4 and run.engine[2] == 1
    assert run.first_token_s[2] < 5.0
