"""docs/invariants.md: every invariant has a number of its own and tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")
INVARIANTS = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
TESTS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def test_invariants_are_numbered_and_each_names_its_test() -> None:
    assert [int(number) for number, _ in INVARIANTS] == [*range(1, len(INVARIANTS) + 1)]
    assert [number for number, text in INVARIANTS if "::test_" not in text] == []


@pytest.mark.parametrize(("file", "name"), TESTS)
def test_the_named_tests_are_there(file: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
