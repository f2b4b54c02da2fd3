"""Settings shared by every test: Hypothesis draws the same examples on every run; signals act as in a terminal, however the
tests were started; on the compiled build, tests that reach into compiled classes are skipped. Kits beside this file are for all
folders."""

import signal
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

# A shell starts what runs in its background with Ctrl-C ignored, and nohup with a hang-up ignored; programs inherit both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if build() == "compiled":
        skip = pytest.mark.skip(reason="reaches into classes that are compiled here")
        for item in items:
            if item.get_closest_marker("pure_python"):
                item.add_marker(skip)
