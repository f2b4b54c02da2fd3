"""Loaders of weights: the catalog's rates are those of the measurements, and an activation takes its bytes over them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
import pytest

from benchmarks.loading import FILE, fitted
from fineserve_sim.catalog import loaders
from fineserve_sim.cluster.compose.policies import build_activation_cost
from fineserve_sim.systems.spec import ActivationSpec, PrismResidencySpec

DATA = Path(__file__).parents[3] / "shared" / "data"


def test_the_catalog_has_what_a_residency_may_name() -> None:
    annotation = ActivationSpec.model_fields["loader"].annotation
    (named, _) = get_args(annotation)
    assert set(get_args(named)) == set(loaders())


@pytest.mark.parametrize("name", sorted(loaders()))
def test_an_activation_takes_its_bytes_over_the_rate(name: str) -> None:
    plain = build_activation_cost(PrismResidencySpec())
    cost = build_activation_cost(PrismResidencySpec.model_validate({"loader": name}))
    assert cost.alone_s(16_000_000_000) == pytest.approx(plain.overhead_s + 16e9 / loaders()[name].bytes_per_s.value)
    started = PrismResidencySpec.model_validate({"loader": name, "engine_pool": False, "engine_start_s": 20.0})
    assert build_activation_cost(started).alone_s(16_000_000_000) == pytest.approx(20 + cost.alone_s(16_000_000_000))
    limit = loaders()[name].node_bytes_per_s
    assert cost.node_bytes_per_s == (limit.value if limit else np.inf)


@pytest.mark.skipif(not (DATA / FILE).is_file(), reason="the measurements are not here")
def test_rates_and_the_errors_of_the_page_are_those_of_the_measurements() -> None:
    found = list(fitted(pd.read_csv(DATA / FILE)))
    for one in found:
        assert loaders()[one.name].bytes_per_s.value == pytest.approx(one.bytes_per_s, rel=0.02)
    page = re.sub(
        r"\s+", " ", (Path(__file__).parents[2] / "docs" / "reference" / "catalog.md").read_text(encoding="utf-8")
    )
    medians, most = ([f"{100 * kind(np.abs(one.errors)):.1f}" for one in found] for kind in (np.median, np.max))
    assert f"{', '.join(medians[:3])} and {medians[3]} % off in the median" in page
    assert f"{', '.join(most[:3])} and {most[3]} % at most" in page
