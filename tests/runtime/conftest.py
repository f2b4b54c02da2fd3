"""Lets the test modules of this folder share their fakes, and find the runtime in a checkout where it is not installed."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[2] / "runtime"):
    sys.path.insert(0, str(folder))
