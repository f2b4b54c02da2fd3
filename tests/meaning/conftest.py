"""Lets the tests of this folder share its kits and those of ``tests/cluster``."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "cluster")]
