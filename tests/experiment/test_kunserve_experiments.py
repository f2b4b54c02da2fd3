"""KunServe's files: the engine's settings are one reading in all of them, and what it leaves for KV is what the pages say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fineserve_sim.catalog import gpu, model, precision
from fineserve_sim.cluster import EngineSettings
from fineserve_sim.cluster.compose.memory import peak_activation_bytes, resident_bytes, usable_bytes
from fineserve_sim.cluster.scenario import Gpu, ServedModel

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "experiments").glob("kunserve_*.yaml"))
PAGE = (ROOT / "docs" / "reproduction" / "kunserve.md").read_text(encoding="utf-8")


def test_every_file_has_the_same_engine() -> None:
    assert len(FILES) == 9
    for path in FILES:
        engine = yaml.safe_load(path.read_text(encoding="utf-8"))["engine"]
        assert engine == {"deployment": "vllm-v1", "max_sequences": 512}, path.name


def kv_bytes(max_sequences: int) -> int:
    """What an engine of Qwen2.5-14B leaves for KV on an A800."""
    settings = EngineSettings(deployment="vllm-v1", max_sequences=max_sequences)
    served = ServedModel("14b", model("qwen2.5-14b"), precision("fp16"), 1, 1.0, 1.0, 1.0, 1.0)
    usable = usable_bytes(Gpu(0, 0, gpu("a800")), settings)
    return usable - resident_bytes(served, settings) - peak_activation_bytes(served, settings)


def test_the_page_has_the_kv_memory_of_an_a800_before_and_after() -> None:
    after, before = kv_bytes(512), kv_bytes(1024)
    said = f"{after / 2**30:.1f} GiB ({after / 1e9:.1f} GB) for KV instead of {before / 2**30:.1f} under 1,024"
    assert said in " ".join(PAGE.split())
    assert f"({kv_bytes(256) / 2**30:.1f} GiB)" in PAGE
    assert after / 1e9 == pytest.approx(45, rel=0.05), "the paper's 45 GB"
