"""What decides claims without any experiment, against numbers worked out here from the papers' formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fineserve_sim.experiment.reproduce import Experiments, chosen, reproduce, targets
from fineserve_sim.experiment.reproduce.finished import Results
from fineserve_sim.experiment.reproduce.judge import Evaluation
from fineserve_sim.experiment.reproduce.papers import DECIDERS

GIB = 2**30
ANALYTIC = sorted(name for name, decider in DECIDERS.items() if decider.by == "analysis")


def evaluation(claim: str) -> Evaluation:
    """What decides a claim without any experiment says of it."""
    return DECIDERS[claim].decide(Results(Path("nowhere")))


def answer(claim: str) -> Any:
    """Its number, or its numbers, or whether the law holds."""
    values = tuple(quantity.value for quantity in evaluation(claim).quantities)
    return values if len(values) > 1 else values[0]


@pytest.mark.slow
def test_each_fits_its_target_and_says_why(tmp_path: Path) -> None:
    rows = reproduce(chosen(targets(), None, ANALYTIC), Experiments(), tmp_path)
    assert len(rows) == len(ANALYTIC) >= 44
    for row in rows:
        assert row.verdict != "not decidable here" and row.by == "analysis" and row.reason.endswith(".")
        assert all(each.value is True or each.value is False or math.isfinite(each.value) for each in row.quantities)


@pytest.mark.parametrize("claim", ANALYTIC)
def test_each_gives_the_same_again(claim: str) -> None:
    assert evaluation(claim) == evaluation(claim)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FS-eq-tokensize", (8 * 128 * 2 * 2, 8 * 128 * 2, 8 * 128, 4 * 128 * 2 * 2)),
        ("FS-eq-blocksize", (65536, 32768, 16384 + 16 * 8 * 2 * 4)),
        ("FS-eq-slab", 0),
        ("FS-3-slope-values", (GIB // (4096 * 32), GIB // (2048 * 32), GIB // (4096 * 32), GIB // (1088 * 32))),
        ("FS-8-blkid", (2, 3)),
        ("FS-5a-external", True),
        ("PR-5.1-pages", 2),
        ("VT-2-oom", 64),
        ("VT-2-vllm", True),
        ("VT-5-chunk", (2048, 1024, 256)),
        ("VT-5-prefix", 0),
        ("VT-5-overlap", 0),
        ("FS-eq3-props", True),
    ],
)
def test_values_worked_out_by_hand(name: str, expected: object) -> None:
    assert answer(name) == pytest.approx(expected)


def test_half_a_chunk_a_tensor_is_reserved() -> None:
    """64 requests x 64 tensors x 1 MB of 80 GB, as evenly as 64 lengths spread over a chunk."""
    assert answer("VT-2-reserve") == pytest.approx(100 * 64 * 64 * 2**20 / (80 * GIB), rel=0.01)


def test_tail_waste_doubles_with_the_block() -> None:
    """Uniform tails would give 15.5 / 7.5 = 2.07."""
    assert answer("FS-5b-internal") == pytest.approx(31 / 15, rel=0.05)


def test_memory_that_vtensors_leave_free() -> None:
    """On average over batch sizes: a request maps its tokens and half a chunk of 256."""
    from fineserve_sim.experiment.reproduce.papers.vtensor.memory import BATCHES, SEVEN_B, request_tokens

    mean_batch = sum(BATCHES) / len(BATCHES)
    kv = mean_batch * (request_tokens() + 128) * 512 * 1024
    free_gb, percent = answer("VT-2-free")
    assert free_gb == pytest.approx((SEVEN_B.kv_bytes - kv) / GIB, abs=0.7)
    assert percent == pytest.approx(free_gb / 0.8)
    assert SEVEN_B.weight_bytes == pytest.approx(13.48e9, rel=1e-3)


# --- KunServe and Prism -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("KS-2-token", 48 * 8 * 128 * 2 * 2 / 1024),
        ("KS-4.1-7layer", 100 * 6 / 7),
        ("KS-6-freed", 1),
        ("KS-9-imbalance", True),
        ("KS-eq4", True),
        ("KS-3-ppcomm", 1 / 96),
        ("PR-9-order", True),
        ("PR-alg1-bound", True),
        ("PR-alg1-tp", True),
        ("PR-alg2-optimal", True),
    ],
)
def test_plans_and_algorithms_worked_out_by_hand(name: str, expected: float | bool) -> None:
    assert answer(name) == pytest.approx(expected)


def test_weights_over_memory() -> None:
    """14.77, 72.7, 253 and 405.9 billion parameters of two bytes over 80, 320, 640 and 1280 GiB."""
    parameters = (14.77e9, 72.71e9, 253e9, 405.85e9)
    expected = [100 * 2 * count / (gpus * 80 * GIB) for count, gpus in zip(parameters, (1, 4, 8, 16), strict=True)]
    assert answer("KS-T1") == pytest.approx(expected, rel=0.001)


def test_smallest_groups_first_is_not_always_best() -> None:
    """Six instances that must free four copies: 2, 2, 2 merge to 4, 2, where 3, 3 would do."""
    found = evaluation("KS-6-greedy")
    assert found.quantities[0].value is False and "6 instances and 4 copies: 4 instead of 3" in found.detail


def test_a_stall_spread_over_a_response() -> None:
    """(72 GiB - 27.5 GiB) / 2 at 25 GB/s."""
    assert answer("KS-4.2-tpot") == pytest.approx(1000 * (72 - 27.51) * GIB / 2 / 25e9 / 200, rel=0.001)


def test_lengths_are_those_of_the_sketches() -> None:
    assert answer("KS-data") == pytest.approx((1428, 435, 10041, 471), rel=0.02)


def test_activation_follows_from_sizes_and_rates() -> None:
    assert answer("PR-9-small") == pytest.approx(16.06 / 22.7 + 0.02, rel=0.001)
    assert answer("PR-9-14b") == pytest.approx(
        (29.54 / 22.7 + 0.02, 29.54 / 4.2 + 0.02, (29.54 / 4.2 + 0.02) / (29.54 / 22.7 + 0.02)), rel=0.001
    )
    low, high = answer("PR-9-range")
    assert low == pytest.approx((141.1 / 8 / 4.2 + 0.02) / (141.1 / 94 + 0.02), rel=0.001)
    assert high == pytest.approx((29.54 / 4.2 + 0.02) / (29.54 / 22.7 + 0.02), rel=0.001)


def test_generated_traces_show_what_they_are_made_from() -> None:
    """Prism, section 3.1: the statistics that fix the generators, in a drawn trace."""
    assert answer("PR-1a-tail") < 100
    share, periods = answer("PR-1-idle-count")
    assert share > 60 and periods > 1000
    assert answer("PR-1b-fluct") > 5
    assert answer("PR-2a-share") == pytest.approx((60, 25), abs=2)
    every, arena = answer("PR-2b-idle")
    assert every > 30 and arena > 80
    median, most, idle = answer("PR-2c-idle-rate")
    assert median == pytest.approx(40, rel=0.1) and most > 100 and idle >= 27
    provider_cv, arena_cv = answer("PR-2d-cv")
    assert provider_cv > 1 and arena_cv > 0.5
