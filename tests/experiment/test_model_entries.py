"""Texts that name models become entries of ``models``."""

from __future__ import annotations

import pytest

from fineserve_sim.experiment.file.comparison import model_entries
from fineserve_sim.planning.wish import model_wish


def names(*models: str) -> list[str]:
    return [entry["id"] for entry in model_entries(models, spread=False)]


def test_one_model_in_two_precisions_needs_no_names() -> None:
    """They were refused: one name twice."""
    assert names("llama-3.1-8b:fp8", "llama-3.1-8b:awq", "qwen3-32b") == [
        "llama-3.1-8b-fp8",
        "llama-3.1-8b-awq",
        "qwen3-32b",
    ]


def test_a_model_without_a_precision_has_that_of_its_checkpoint() -> None:
    texts = ["gpt-oss-20b", "deepseek-v3", "llama-3.1-8b", "not-there"]
    assert [model_entries([text], spread=False)[0]["precision"] for text in texts] == [
        *("W4A16-MXFP4", "W8A8-block", "W16A16", "W16A16")
    ]
    assert model_wish("gpt-oss-120b").options == (("W4A16-MXFP4", 1),)


def test_names_stay_as_they_were_given() -> None:
    assert names("llama-3.1-8b:fp8", "b=llama-3.1-8b:awq") == ["llama-3.1-8b", "b"]
    assert names("A=llama-3.1-8b:fp8", "A=llama-3.1-8b:awq") == ["A", "A"]  # refused later, with what to do


def test_shares_are_equal_where_requests_are_spread() -> None:
    entries = model_entries(["llama-3.1-8b", {"id": "x", "model": "qwen3-32b"}], spread=True)
    assert [entry["share"] for entry in entries] == [1.0, 1.0]


@pytest.mark.parametrize("text", ["", "a:b:c:d", "a=b:fp8:two"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME=MODEL:PRECISION:TP"):
        model_entries([text], spread=False)
