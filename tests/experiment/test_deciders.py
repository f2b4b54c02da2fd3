"""What decides the ledger's claims: one thing each, from experiments that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from fineserve_sim.experiment.reproduce import targets
from fineserve_sim.experiment.reproduce.judge import Evaluation
from fineserve_sim.experiment.reproduce.papers import DECIDERS
from fineserve_sim.experiment.reproduce.registry import claim


def test_every_evaluator_has_a_target() -> None:
    assert set(DECIDERS) <= set(targets())
    assert all(found.expect and found.what and found.where for found in targets().values())


def test_every_decider_finds_its_experiments() -> None:
    shipped = {path.stem for path in (Path(__file__).parents[2] / "experiments").glob("*.yaml")}
    assert {name for decider in DECIDERS.values() for name in decider.needs} <= shipped


def test_what_nothing_can_decide_has_no_decider() -> None:
    undecidable = {name for name, each in targets().items() if each.undecidable}
    assert undecidable and not undecidable & set(DECIDERS)


def test_two_functions_do_not_decide_one_claim() -> None:
    with pytest.raises(ValueError, match="claim KS-5 is decided by two functions"):
        claim("KS-5")(Evaluation)
