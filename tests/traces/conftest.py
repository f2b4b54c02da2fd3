"""Fixtures of the trace tests: a generator, a small trace, and the public data beside the checkout."""

import sys
from pathlib import Path

import numpy as np
import pytest
from fineserve_traces import Trace

sys.path.insert(0, str(Path(__file__).parent))
SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip("shared/data, the public traces beside the checkout, is not here")
    return SHARED_DATA


@pytest.fixture
def small() -> Trace:
    """Four requests of two models; blocks of 10 tokens, the second and third prompt share their first block."""
    return Trace(
        arrival_s=np.array([0.0, 1.0, 1.0, 61.0]),
        model=np.array([0, 1, 0, 0]),
        prompt_tokens=np.array([5, 20, 12, 30]),
        output_tokens=np.array([1, 2, 3, 4]),
        models=("a", "b"),
        source="small",
        prefix_hashes=((1,), (2, 3), (2, 4), ()),
        prefix_block_tokens=10,
    )
