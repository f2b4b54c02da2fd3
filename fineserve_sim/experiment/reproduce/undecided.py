"""Why a claim that no evaluator takes up cannot be decided here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "PR-1-dedicated": "The 24 models of the trace are not listed, and the numbers follow from their sizes alone.",
        "PR-2a-3b": "The rate of that model in the trace is not given, and its compute use follows from it.",
        "KS-5.1-infercept": "The original InferCept differs by kernels of its time, which no table at hand has.",
    }
)

GPU = "Needs fineserve-calibrate: fineserve-calibrate claims, after fineserve-calibrate --gpu h100."
"""The same for claims that take a GPU, where the calibrator is not installed."""
