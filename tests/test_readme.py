"""README.md: what it says of errors and claims is what the pages behind it have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generate.errors import GROUPS, rows

ROOT = Path(__file__).parents[1]
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def spread(group: str, metric: str) -> str:
    """The lowest and highest median error of the sets of a group, as the README gives them."""
    (holds,) = (one.holds for one in GROUPS if one.name.startswith(group))
    values = sorted(getattr(row, f"{metric}_median_abs") for row in rows() if holds(row))
    return f"{100 * values[0]:.1f} to {100 * values[-1]:.1f} %"


def test_limits_begin_with_several_models_a_gpu() -> None:
    limits = README[README.index("## Limits") :]
    below, above = "three 8B on one A100, below", "three 8B on one A100, above"
    assert limits.startswith("## Limits **Several models on a GPU are the weak spot**")
    assert (
        f"is {spread(below, 'tpot')} for the time per token and {spread(below, 'ttft')} for the time to first" in limits
    )
    assert f"{spread(above, 'tpot')} and {spread(above, 'ttft')} above" in limits


@pytest.mark.parametrize(("metric", "said"), [("tpot", "(time per token)"), ("ttft", "(first token)")])
def test_the_error_of_a_single_model_is_the_table_s(metric: str, said: str) -> None:
    assert f"{spread('70B FP8 at TP 2, 4, 8: H100', metric)} {said}" in README


def test_the_worst_set_is_named_with_its_errors() -> None:
    """What a reader should fear most stands there, not only that something is worse. One row alone is no set."""
    sets = [row for row in rows() if row.n > 1]
    worst = max(
        GROUPS, key=lambda group: max((row.tpot_median_abs or 0.0 for row in sets if group.holds(row)), default=0.0)
    )
    assert worst.name.startswith("8B FP8") and worst.name.endswith("H200, vLLM")
    named = f"the worst, an 8B in FP8 under vLLM on H200s, is off by {spread(worst.name, 'tpot')} and"
    assert f"{named} {spread(worst.name, 'ttft')}" in README


def test_the_counts_of_claims_are_the_ledger_s() -> None:
    ledger = " ".join((ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8").split())
    counts = re.search(r"of (\d+) claims (\d+) are reproduced; of the others (\d+) come out in their direction", README)
    found = re.search(r"(\d+) direction only, .* (\d+) of the (\d+) in the fixed list reproduced", ledger)
    assert counts is not None and found is not None
    assert counts.groups() == (found[3], found[2], found[1])


def test_the_readme_shows_two_commands_one_picture_and_one_paragraph_of_limits() -> None:
    (block,) = re.findall(r"```sh (.*?)```", README)
    assert block.count("python3 dev.py") == 2
    assert len(re.findall(r"!\[", README)) == 1
    (caption,) = re.findall(r"<!-- generated: fig10-caption -->(.*?)<!-- end -->", README)
    assert len(caption.split()) <= 50
    *_, limits = (ROOT / "README.md").read_text(encoding="utf-8").split("## Limits\n\n")
    paragraph, licence = limits.strip().split("\n\n")
    assert len(paragraph.split()) <= 180 and licence.startswith("Apache-2.0")
