"""Results mean what they say, for clusters that Hypothesis draws; ``many_clusters.py`` draws as many as one likes."""

from __future__ import annotations

from random import Random

import pytest
from drawkit import SYSTEMS
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from meanings import MEANINGS

from fineserve_sim.cluster import ScenarioError

RANDOM = st.randoms(use_true_random=False)


@pytest.mark.parametrize("meaning", MEANINGS)
@settings(max_examples=25)
@given(data=st.data(), random=RANDOM)
def test_results_mean_what_they_say(meaning: str, data: st.DataObject, random: Random) -> None:
    law, systems = MEANINGS[meaning]
    name = data.draw(st.sampled_from(systems))
    try:
        problem = law(random, name)
    except ScenarioError:
        assume(False)
    assert problem is None, f"{name}: {problem}"


def test_every_system_takes_part() -> None:
    seen = {name for meaning in MEANINGS.values() for name in meaning.systems}
    assert seen == set(SYSTEMS)
    assert all(len(meaning.systems) > 10 for meaning in MEANINGS.values())
