"""The comparison of two checkouts sees every difference of content, and none in names or encodings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import compare_checkouts

    return compare_checkouts


def write(folder: Path, key: str, *, encode: bool = False, **changed: Any) -> Path:
    """A results folder with one run of two requests; ``changed`` replaces values by name."""
    value = {
        "attainment": 0.5,
        "finish_s": [1.0, float("nan")],
        "waiting": [0, 3],
        "mean": 0.25,
        "iterations": 9,
    } | changed
    (folder / "cells").mkdir(parents=True)
    system = pa.array(["a", "a"])
    requests = {
        "system": system.dictionary_encode() if encode else system,
        "request": [0, 1],
        "finish_s": value["finish_s"],
    }
    cells = {"system": ["a"], "seed": [0], "run": [key], "attainment": [value["attainment"]]}
    pq.write_table(pa.table(cells), folder / "cells.parquet")
    pq.write_table(pa.table(requests), folder / "requests.parquet")
    timeline = {"time_s": [0.0, 1.0], "waiting.0": value["waiting"]}
    pq.write_table(pa.table(timeline), folder / "cells" / f"{key}.timeline.parquet")
    summary = {"cells": [{"runs": [key], "metrics": {"ttft": {"mean": value["mean"], "half_width": None}}}]}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "cells" / f"{key}.json").write_text(json.dumps({"iterations": value["iterations"]}))
    return folder


@pytest.fixture
def differing(tool: ModuleType, tmp_path: Path) -> Callable[..., dict[str, list[str]]]:
    def compare(**changed: Any) -> dict[str, list[str]]:
        old, new = write(tmp_path / "old", "one"), write(tmp_path / "new", "two", **changed)
        return {file: found for file, found in tool.compared(old, new) if found}

    return compare


def test_names_of_runs_and_encodings_do_not_matter(differing: Callable[..., dict[str, list[str]]]) -> None:
    assert differing(encode=True) == {}


@pytest.mark.parametrize(
    ("changed", "file", "words"),
    [
        ({"attainment": 0.5 + 2**-53}, "cells.parquet", "column attainment, row 0 (system a seed 0): 0.5 !="),
        ({"finish_s": [1.0, 2.0]}, "requests.parquet", "row 1 (system a request 1): nan != 2.0"),
        ({"waiting": [0, 4]}, "1 timelines", "cell 0 a seed 0: column waiting.0, row 1: 3 != 4"),
        ({"mean": 0.250001}, "summary.json", "cells[0].metrics.ttft.mean: 0.25 != 0.250001"),
        ({"mean": None}, "summary.json", "0.25 != None"),
        ({"iterations": 10}, "1 cells/KEY.json", "iterations: 9 != 10"),
    ],
    ids=str,
)
def test_each_value_matters(
    differing: Callable[..., dict[str, list[str]]], changed: dict[str, Any], file: str, words: str
) -> None:
    found = differing(**changed)
    assert list(found) == [file] and words in found[file][0]


def test_what_is_missing_is_a_difference(tool: ModuleType, tmp_path: Path) -> None:
    old, new = write(tmp_path / "old", "one"), write(tmp_path / "new", "two")
    (new / "cells" / "two.timeline.parquet").unlink()
    found = {file: words for file, words in tool.compared(old, new) if words}
    assert found == {"1 timelines": ["cell 0 a seed 0: only in the baseline"]}
    assert list(tool.differing_values({"a": 1}, {"a": 1.0})) == ["a: 1 != 1.0"]
    assert list(tool.differing_values({"a": [1]}, {"a": [1, 2], "b": 0})) == [
        "a: [1] != [1, 2]",
        "b only in the candidate",
    ]
