"""The page of parity shows the tables that the benchmark makes of the runs that are kept; loads are drawn as described."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.runtime_figures import FIGURES, table

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", FIGURES)
def test_the_page_shows_the_tables_of_the_kept_runs(name: str) -> None:
    kept = json.loads((DOCS / "data" / "runtime_figures.json").read_text(encoding="utf-8"))[name]
    page = (DOCS / "parity.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in table(kept, FIGURES[name]).splitlines() if line.startswith("|")]
    assert len(rows) == 2 * (len(kept) + 2) and not [row for row in rows if row not in page]


def test_two_of_four_models_are_asked_for_at_any_time() -> None:
    figure = FIGURES["idle"]
    for now_s in np.arange(0.1, 48, 1.0).tolist():
        assert sum(figure.rate(model, now_s) > 0 for model in range(figure.models)) == 2


def test_draws_repeat_and_keep_their_bounds() -> None:
    figure = FIGURES["bursts"]
    rows = figure.draw(3, 60.0, 4.0)
    assert rows == figure.draw(3, 60.0, 4.0) != figure.draw(4, 60.0, 4.0)
    assert rows == sorted(rows) and all(16 <= row[2] <= 160 and 64 <= row[3] <= 256 for row in rows)
    burst = sum(5 <= row[0] % 15 < 10 for row in rows)
    assert burst > 2 * (len(rows) - burst)
