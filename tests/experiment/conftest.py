"""A small experiment file and the stand-in cluster; the test modules of this folder share ``browserkit``."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))

TEXT = """\
fineserve: 1
title: Small
cluster: {gpu: h100-sxm, count: 2}
models:
  - {id: A, model: llama-3.1-8b, precision: W16A16, share: 2}
  - {id: B, model: llama-3.1-8b, precision: fp8, share: 3}
workload:
  lengths: {prompt_tokens: 512, output_tokens: 20}
  arrivals: {process: poisson}
  requests: 60
  warmup_requests: 10
slo:
  ttft: {reference: {system: dedicated, load: isolated, quantile: 0.95}, scale: 4}
systems: [fineserve, "prism*"]
loads:
  A: {rate_per_s: 20}
sweeps:
  - {name: slo, axes: {slo_scale: [2, 4]}, at: {rate_scale: 2}}
  - {name: rate, axes: {rate_scale: [1, 2]}, at: {slo_scale: 4}}
seeds: 3
quick: {workload.requests: 30, seeds: 1}
"""

WriteFile = Callable[..., Path]


@pytest.fixture
def write_file(tmp_path: Path) -> WriteFile:
    """Write the small experiment with some texts replaced; the path of the file."""

    def write(*changes: tuple[str, str], name: str = "small.yaml") -> Path:
        text = TEXT
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in cluster, importable by worker processes too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    module = importlib.import_module("fake_cluster")
    monkeypatch.setattr(module, "calls", 0)
    monkeypatch.setattr(module, "stop_after", math.inf)
    return module
