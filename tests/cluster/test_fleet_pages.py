"""Buffers of pages that are mapped ahead, for engines that come later than others."""

from __future__ import annotations

import pytest
from fleetkit import PRISM, fleet
from lawkit import bounded, differences
from simkit import Row

from fineserve_sim.cluster import Fate, Scenario

BUFFERED = {"policy": "kvcached", "mode": "buffered"}


def newcomer(prompt_tokens: int) -> Scenario:
    """Model 2 comes back, in the place of the idle model 1, while model 0 decodes beside it."""
    rows: list[Row] = [(4.9, 64, 900, 0), (5.0, prompt_tokens, 8, 2)]
    return fleet(rows, PRISM, models=3, hosted=2, kv_tokens=16384, memory=BUFFERED)


@pytest.mark.parametrize("prompt_tokens", [64, 65, 90, 128, 300])
def test_pages_of_a_newcomer_are_mapped_from_when_it_comes(prompt_tokens: int) -> None:
    """And not from when somebody last looked at the memory, which is later in a plain run than in a merged one."""
    scenario = newcomer(prompt_tokens)
    merged, plain = bounded(scenario), bounded(scenario, exact_steps=True)
    assert (merged.result.fate == Fate.FINISHED).all()
    assert next(differences(merged, plain), None) is None
