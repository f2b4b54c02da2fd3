"""KunServe's workloads by the means that the paper prints (section 5.1; claim KS-data)."""

from __future__ import annotations

import numpy as np
import pytest
from fineserve_traces import length_source


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [("burstgpt", 642, 262), ("sharegpt_multiturn_4k", 1433, 440), ("arxiv_sample_8k", 5855, 372)],
)
def test_means(name: str, prompt: float, output: float) -> None:
    sample = length_source(name).sample(np.random.default_rng(1), 200_000)
    assert [tokens.mean() for tokens in sample] == pytest.approx([prompt, output], rel=0.02)


def test_a_fitted_law_needs_no_data(tmp_path: object) -> None:
    assert length_source("burstgpt", str(tmp_path)) is length_source("burstgpt")
    assert "lognormal" in length_source("burstgpt").source
