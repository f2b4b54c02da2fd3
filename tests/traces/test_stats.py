"""Statistics: a trace worked by hand, and the published traces against the table that came with them."""

import json

import numpy as np
import pytest
from fineserve_traces import ConstantLengths, describe, generate, prefix_hit_ratio, read_trace
from fineserve_traces.model_stats import rate_variance

# requests, span_s, prompt mean/p50/p95, output mean/p50/p95, req/s, peak and mean per minute, CV/min, CV of
# inter-arrival times, models: as documented with the files in shared/data.
PUBLISHED = {
    "azure2023_code.csv.gz": (8819, 3436, (2048, 1469, 7303), (27.9, 13, 90), 2.57, 632, 151, 1.04, 13.2, 1),
    "azure2023_conv.csv.gz": (19366, 3502, (1155, 1020, 4083), (211, 129, 451), 5.53, 507, 333, 0.22, 1.09, 1),
    "mooncake_conversation.jsonl.gz": (
        *(12031, 3537, (12035, 6909, 39550), (343, 350, 698), 3.40),
        *(247, 204, 0.12, 3.03, 1),
    ),
    "mooncake_synthetic.jsonl.gz": (3993, 1022, (15325, 11587, 48905), (149, 69, 519), 3.91, 273, 234, 0.07, 1.01, 1),
    "mooncake_arxiv_first1000.jsonl.gz": (
        1000,
        177,
        (9792, 6558, 27307),
        (199, 34, 610),
        5.65,
        330,
        322,
        0.03,
        4.03,
        1,
    ),
    "arena_27models.csv.gz": (1500, 600, (136, 40, 653), (256, 211, 513), 2.50, 183, 150, 0.13, 1.10, 27),
}


def test_by_hand(small):
    stats = describe(small)
    assert (stats.requests, stats.span_s, stats.rate_per_s) == (4, 61.0, 4 / 61)
    assert (stats.peak_per_minute, stats.mean_per_minute, stats.cv_per_minute) == (3, 3.0, 0.0)
    gaps = np.array([1.0, 0.0, 60.0])
    assert stats.cv_inter_arrival == pytest.approx(gaps.std() / gaps.mean())
    assert stats.prompt.mean == pytest.approx(67 / 4)
    assert stats.output.max == 4
    assert stats.model_shares == {"a": 0.75, "b": 0.25}
    assert stats.prefix_hit_ratio == pytest.approx(10 / 67)  # the third prompt finds the first block of the second
    assert json.loads(json.dumps(stats.as_dict()))["prompt"]["p50"] == 16.0


def test_minutes_count_from_the_first_arrival(small):
    """Times of a CSV stay as they are, seconds since 1970 among them."""
    later = describe(small.with_arrivals(small.arrival_s + 1.7e9))
    assert (later.peak_per_minute, later.mean_per_minute, later.cv_per_minute) == (3, 3.0, 0.0)


def test_figures_that_do_not_exist_are_none(rng):
    stats = describe(generate(np.array([5.0]), ConstantLengths(1, 1), rng))
    assert stats.rate_per_s is stats.cv_inter_arrival is stats.peak_per_minute is stats.prefix_hit_ratio is None
    assert stats.span_s == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_traces(shared_data, name):
    stats = describe(read_trace(shared_data / "traces" / name))
    requests, span_s, prompt, output, rate, peak, per_minute, cv_minute, cv_gap, models = PUBLISHED[name]
    assert (stats.requests, stats.dropped_rows, stats.peak_per_minute) == (requests, 0, peak)
    assert stats.span_s == pytest.approx(span_s, abs=0.5)
    assert stats.prompt[:3] == pytest.approx(prompt, abs=0.51)
    assert stats.output[:3] == pytest.approx(output, abs=0.51)
    assert stats.rate_per_s == pytest.approx(rate, abs=0.005)
    assert stats.mean_per_minute == pytest.approx(per_minute, abs=0.51)
    assert stats.cv_per_minute == pytest.approx(cv_minute, abs=0.005)
    assert stats.cv_inter_arrival == pytest.approx(cv_gap, rel=0.005)
    assert len(stats.model_shares) == models


@pytest.mark.parametrize(("name", "ratio"), [("mooncake_conversation", 0.374), ("mooncake_synthetic", 0.651)])
def test_published_prefix_reuse(shared_data, name, ratio):
    trace = read_trace(shared_data / "traces" / f"{name}.jsonl.gz")
    assert prefix_hit_ratio(trace) == pytest.approx(ratio, abs=0.0005)


def test_arena_shares(shared_data):
    stats = describe(read_trace(shared_data / "traces" / "arena_27models.csv.gz", "arena"))
    counts = sorted((round(share * 1500) for share in stats.model_shares.values()), reverse=True)
    assert counts[:5] == [296, 262, 199, 120, 67]


@pytest.mark.parametrize("name", ["burstgpt_v1_dense_120.csv", "burstgpt_v1_span30s_120.csv"])
def test_burstgpt_rows(shared_data, name):
    assert len(read_trace(shared_data / "traces" / name)) == 120


def test_the_variance_of_a_rate_leaves_out_what_chance_does() -> None:
    """Poisson arrivals have none; a rate that is nought or twice its mean, as often, has 1."""
    rng = np.random.default_rng(0)
    steady = np.sort(rng.uniform(0, 20_000, 40_000))
    assert rate_variance(steady, 5.0, 20_000) == pytest.approx(0.0, abs=0.01)
    turns = np.sort(rng.uniform(0, 10_000, 40_000))
    turns += np.floor(turns / 50) * 50  # in every other fifty seconds
    assert rate_variance(turns, 5.0, 20_000) == pytest.approx(1.0, abs=0.03)
    assert rate_variance(steady[:0], 5.0, 100.0) == rate_variance(steady[:3], 5.0, 4.0) == 0.0
