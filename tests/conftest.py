"""Settings shared by every test: Hypothesis draws the same examples on every run; on the compiled build, tests that reach into
compiled classes are skipped. Kits beside this file are for all folders."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from fineserve_sim.build import build

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile(
    "fineserve", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60
)
settings.load_profile("fineserve")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if build() == "compiled":
        skip = pytest.mark.skip(reason="reaches into classes that are compiled here")
        for item in items:
            if item.get_closest_marker("pure_python"):
                item.add_marker(skip)
