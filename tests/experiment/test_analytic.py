"""Analytic evaluators: what they answer, against numbers worked out here from the papers' formulas, and the ledger's ids."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from fineserve_sim.experiment.analytic import Finding, evaluators

LEDGER = Path(__file__).parents[3] / "shared" / "spec" / "claims.yaml"
GIB = 2**30
ALL = evaluators()


@pytest.mark.parametrize("name", sorted(ALL))
def test_each_says_a_value_a_unit_and_why(name: str) -> None:
    found = ALL[name]()
    values = found.value if isinstance(found.value, tuple) else (found.value,)
    assert isinstance(found, Finding) and found.unit and found.detail.endswith(".")
    assert all(isinstance(value, str | bool) or math.isfinite(value) for value in values)
    assert ALL[name]() == found  # pure


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FS_eq_tokensize", (8 * 128 * 2 * 2, 8 * 128 * 2, 8 * 128, 4 * 128 * 2 * 2)),
        ("FS_eq_blocksize", (65536, 32768, 16384 + 16 * 8 * 2 * 4)),
        ("FS_eq_slab", 0),
        ("FS_3_slope_values", (GIB // (4096 * 32), GIB // (2048 * 32), GIB // (4096 * 32), GIB // (1088 * 32))),
        ("FS_8_blkid", (2, 3)),
        ("FS_5a_external", True),
        ("PR_5_1_pages", 2),
        ("VT_2_oom", 64),
        ("VT_2_vllm", True),
        ("VT_11a", True),
        ("VT_5_chunk", (2048, 1024, 256)),
        ("VT_5_prefix", 0),
        ("VT_5_overlap", 0),
        ("FS_3_order", True),
        ("FS_eq3_props", True),
    ],
)
def test_values_worked_out_by_hand(name: str, expected: object) -> None:
    assert ALL[name]().value == pytest.approx(expected)


def test_half_a_chunk_a_tensor_is_reserved() -> None:
    """64 requests x 64 tensors x 1 MB of 80 GB, as evenly as 64 lengths spread over a chunk."""
    assert ALL["VT_2_reserve"]().value == pytest.approx(100 * 64 * 64 * 2**20 / (80 * GIB), rel=0.01)


def test_tail_waste_doubles_with_the_block() -> None:
    """Uniform tails would give 15.5 / 7.5 = 2.07."""
    assert ALL["FS_5b_internal"]().value == pytest.approx(31 / 15, rel=0.05)


def test_memory_that_vtensors_leave_free() -> None:
    """On average over batch sizes: a request maps its tokens and half a chunk of 256."""
    from fineserve_sim.experiment.analytic.vtensor import BATCHES, SEVEN_B, request_tokens

    mean_batch = sum(BATCHES) / len(BATCHES)
    kv = mean_batch * (request_tokens() + 128) * 512 * 1024
    free_gb, percent = ALL["VT_2_free"]().value  # type: ignore[misc]
    assert free_gb == pytest.approx((SEVEN_B.kv_bytes - kv) / GIB, abs=0.7)
    assert percent == pytest.approx(free_gb / 0.8)
    assert SEVEN_B.weight_bytes == pytest.approx(13.48e9, rel=1e-3)


def test_every_evaluator_answers_a_claim_of_the_ledger() -> None:
    if not LEDGER.exists():
        pytest.skip("shared/spec lies beside the checkout and is absent here")
    ids = {claim["id"].replace("-", "_").replace(".", "_") for claim in yaml.safe_load(LEDGER.read_text())["claims"]}
    assert ALL.keys() <= ids
