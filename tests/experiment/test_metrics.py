"""Metrics by hand, by their laws, and intervals by their coverage."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.cluster import Cause, Fate
from fineserve_sim.experiment.file.metric_names import PERCENTILES
from fineserve_sim.experiment.results.hits import Hits
from fineserve_sim.experiment.results.metrics import counts, estimate, measure
from fineserve_sim.experiment.results.misses import CAUSES
from fineserve_sim.experiment.results.stats import Estimate, difference, of_share, over_runs, ratio
from fineserve_sim.experiment.run.run_data import RunData


def run_of(
    arrival_s: list[float],
    first_token_s: list[float],
    finish_s: list[float],
    output_tokens: list[int],
    fate: list[Fate],
    model: list[int] | None = None,
    warmup: int = 0,
) -> RunData:
    count = len(arrival_s)
    return RunData(
        models=("A", "B"),
        model=np.array(model or [0] * count, dtype=np.int32),
        arrival_s=np.array(arrival_s, dtype=np.float64),
        prompt_tokens=np.ones(count, dtype=np.int64),
        output_tokens=np.array(output_tokens),
        first_token_s=np.array(first_token_s, dtype=np.float64),
        finish_s=np.array(finish_s, dtype=np.float64),
        fate=np.array(fate, dtype=np.int8),
        preemptions=np.ones(count, dtype=np.int64),
        engine=np.zeros(count, dtype=np.int32),
        cause=np.where(np.equal(fate, Fate.CUT), Cause.MEMORY, Cause.NONE).astype(np.int8),
        generated_tokens=np.where(np.isnan(finish_s), 0, output_tokens),
        warmup=warmup,
        engine_models=("A", "B"),
        sample_s=np.array([0.0, 2.0, 4.0, 99.0]),
        waiting=np.array([[9, 9], [1, 0], [3, 1], [9, 9]]),
        kv_used_bytes=np.array([[9, 9], [10, 20], [30, 20], [99, 99]]),
        kv_capacity_bytes=100,
        gpus=2,
    )


NAN = math.nan
F, D, U, C = Fate.FINISHED, Fate.DROPPED, Fate.UNFINISHED, Fate.CUT


def example() -> RunData:
    """A warm-up request and five measured ones in the window from 1 s to 5 s.

    0 (warm-up): 11 tokens, 10 of them decoded evenly from 0 s to 2 s, so 5 in the window; it finishes inside.
    1: first token after 0.5 s, one token only.    2: late first token (2 s), 21 tokens from 4 s to 6 s: 10 inside.
    3: dropped.   4: unfinished, first token at 4.5 s.    5: B's, first token at 5.2 s, outside.
    """
    return run_of(
        arrival_s=[0, 1, 2, 3, 4, 5],
        first_token_s=[0, 1.5, 4, NAN, 4.5, 5.2],
        finish_s=[2, 1.5, 6, NAN, NAN, 5.7],
        output_tokens=[11, 1, 21, 7, 8, 6],
        fate=[F, F, F, D, U, F],
        model=[0, 0, 0, 0, 0, 1],
        warmup=1,
    )


def test_the_example_by_hand() -> None:
    found = measure(example(), {"A": 1.0, "B": 1.0}, {"A": 0.1, "B": 0.1})
    assert found.counts == {
        "arrived": 5, "finished": 3, "dropped": 1, "rejected": 0, "cut": 0, "unfinished": 1, "preemptions": 5,
    }  # fmt: skip
    assert estimate([found], "ttft_attainment").mean == pytest.approx(2 / 5)
    assert estimate([found], "ttft_attainment", "A").mean == pytest.approx(1 / 4)
    assert estimate([found], "tpot_attainment").mean == pytest.approx(3 / 5)  # TPOT of 2 is 0.1 s, of 5 is 0.1 s
    values = {name: value[""] for name, value in found.values.items()}
    assert values["throughput_per_s"] == pytest.approx(2 / 4)
    assert values["goodput_per_s"] == pytest.approx(2 / 4)
    assert values["decode_throughput_tokens_per_s"] == pytest.approx((5 + 10) / 4)
    assert values["token_throughput_per_s"] == pytest.approx((5 + 10 + 3) / 4)
    assert values["ttft_p50_s"] == pytest.approx(0.5)
    assert values["e2e_p50_s"] == pytest.approx(4.0)  # of five, two of which never end
    assert values["ttft_p90_s"] == values["e2e_p90_s"] == math.inf
    assert values["gpu_hours_per_1000_within"] == pytest.approx(2 * 4 / 3600 / 2 * 1000)
    run = example()
    ttft_s = run.ttft_s[run.measured & np.isfinite(run.ttft_s)]
    assert values["ttft_mean_s"] == pytest.approx(sum(ttft_s) / len(ttft_s))
    assert values["waiting_mean"] == pytest.approx(2.5)
    assert values["waiting_max"] == 4
    assert found.values["kv_used_peak_bytes"]["A"] == 30
    assert values["kv_use_mean"] == pytest.approx(0.4)
    assert values["kv_use_peak"] == pytest.approx(0.5)
    assert values["gpu_hours_per_mtoken"] == pytest.approx(2 * 1e6 / (4.5 * 3600))


def test_a_cut_output_is_a_miss_unless_it_is_accepted() -> None:
    """Its first token came, it has a time per token, and no end: what was asked for never came."""
    run = run_of([1, 3], [1.5, 3.5], [2, 4], [3, 3], [F, C])
    limits = ({"A": 1.0, "B": 1.0}, None, {"A": 9.0, "B": 9.0})
    strict, lenient = measure(run, *limits), measure(run, *limits, True)
    assert strict.misses[""] == dict.fromkeys(CAUSES, 0) | {"cut_memory": 1}
    assert (strict.counts["cut"], strict.hits["e2e_attainment"][""].sum()) == (1, 1)
    assert strict.values["ttft_p99_s"][""] == pytest.approx(0.5) and strict.values["e2e_p99_s"][""] == math.inf
    assert lenient.misses[""] == dict.fromkeys(CAUSES, 0) and lenient.values["e2e_p99_s"][""] == pytest.approx(1.0)


def test_every_miss_has_one_cause() -> None:
    """2 is late and 5 alone in its model; with a tight TPOT limit 5 is slow, with a tight end to end overdue."""
    limits = {"A": 1.0, "B": 1.0}
    found = measure(example(), limits)
    assert found.misses[""] == dict.fromkeys(CAUSES, 0) | {"late": 1, "dropped": 1, "unfinished": 1}
    assert found.misses["B"] == dict.fromkeys(CAUSES, 0)
    assert found.tokens == {
        "": {"prompt": 5, "output": 28},
        "A": {"prompt": 4, "output": 22},
        "B": {"prompt": 1, "output": 6},
    }
    assert measure(example(), limits, {"A": 1.0, "B": 0.01}).misses["B"]["slow"] == 1
    overdue = measure(example(), limits, None, {"B": 0.6})
    assert overdue.misses["B"]["overdue"] == 1
    assert estimate([overdue], "e2e_attainment", "B").mean == 0.0
    run = example()
    run.fate[3] = Fate.REJECTED
    assert measure(run, limits).misses["A"]["rejected"] == 1
    assert measure(run, limits, unplaced=["A"]).misses["A"]["unplaced"] == 1


def test_a_lost_request_is_an_error() -> None:
    run = example()
    run.fate[2] = 7
    with pytest.raises(AssertionError, match="5 requests arrived"):
        counts(run)
    run.fate[2] = Fate.DROPPED
    with pytest.raises(AssertionError, match="finish time"):
        counts(run)


requests = st.lists(
    st.tuples(
        st.floats(0, 2),
        st.floats(0, 5),
        st.floats(0, 5),
        st.integers(1, 50),
        st.sampled_from(list(Fate)),
        st.integers(0, 1),
    ),
    min_size=2,
    max_size=30,
)


@given(requests, st.floats(0.01, 6))
def test_laws(rows: list[tuple[float, float, float, int, Fate, int]], limit_s: float) -> None:
    """Fates add up, models add up to the whole, goodput <= throughput, a looser limit is met at least as often."""
    arrival_s = np.cumsum([row[0] for row in rows]) + np.arange(len(rows))
    first_s = [at + row[1] if row[4] in (F, C) else NAN for at, row in zip(arrival_s, rows, strict=True)]
    finish_s = [first + row[2] * (row[3] > 1) for first, row in zip(first_s, rows, strict=True)]
    run = run_of(list(arrival_s), first_s, finish_s, [r[3] for r in rows], [r[4] for r in rows], [r[5] for r in rows])
    tight, loose = (measure(run, {"A": scale * limit_s, "B": scale * limit_s}, None) for scale in (1, 2))
    assert tight.counts["arrived"] == sum(tight.counts[fate.name.lower()] for fate in Fate) == len(rows)
    assert tight.hits["ttft_attainment"][""].sum() <= loose.hits["ttft_attainment"][""].sum()
    for name in ("", "A", "B"):
        hits = tight.hits["slo_attainment"][name]
        assert sum(tight.misses[name].values()) == len(hits) - hits.sum()
    percentiles = [tight.values[f"ttft_p{percent}_s"][""] for percent in PERCENTILES]
    assert percentiles == sorted(percentiles)
    assert tight.values["goodput_per_s"][""] <= tight.values["throughput_per_s"][""]
    for metric in ("throughput_per_s", "goodput_per_s", "decode_throughput_tokens_per_s", "token_throughput_per_s"):
        parts = tight.values[metric]
        assert parts["A"] + parts["B"] == pytest.approx(parts[""])
    decoded = tight.values["decode_throughput_tokens_per_s"][""] * (arrival_s[-1] - arrival_s[0])
    assert decoded <= sum(row[3] - 1 for row in rows if row[4] in (F, C)) + 1e-6


def test_student_interval_over_runs() -> None:
    found = over_runs([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)  # t table: 97.5 %, 2 degrees of freedom
    assert math.isnan(over_runs([1.0]).half_width)
    assert math.isnan(over_runs([1.0, NAN]).mean)


def test_a_share_without_a_miss_is_as_certain_as_its_requests_are_many() -> None:
    """Of n requests without one late, the share of misses is below about 3 / n (one side) to 4 / n (both)."""
    for requests in (40, 400, 40_000):
        for share, hit in ((1, np.ones(requests, dtype=np.bool_)), (0, np.zeros(requests, dtype=np.bool_))):
            found = of_share([Hits.among(hit[: requests // 2]), Hits.among(hit[requests // 2 :])])
            assert found.mean == share and 3 / (requests + 4) < found.half_width < 4 / requests
    assert of_share([Hits.among(np.array([True, True, False, True]))]) == (0.75, 0.75)  # of four batches: 0.8
    assert math.isnan(of_share([Hits.among(np.ones(1, dtype=np.bool_))]).half_width)
    assert math.isnan(of_share([Hits.among(np.empty(0, dtype=np.bool_))]).mean)


def test_a_share_of_bursts_is_as_uncertain_as_its_batches() -> None:
    """Half of the batches late as a whole: the batches' interval, by Student's t over 20 of them, is the wider one."""
    burst = np.repeat([True, False], 1000)
    assert of_share([Hits.among(burst)]).half_width == pytest.approx(
        2.093024 * np.std([0.0, 1.0] * 10, ddof=1) / 20**0.5
    )


@pytest.mark.parametrize(("share", "requests"), [(0.99, 40), (0.99, 400), (0.999, 400), (0.95, 100)])
def test_the_interval_of_few_requests_near_all_covers_the_truth(share: float, requests: int) -> None:
    """Where most runs have no miss at all, so that their batches do not differ."""
    rng = np.random.default_rng(1)
    found = [of_share([Hits.among(rng.random(requests) < share)]) for _ in range(400)]
    assert sum(abs(each.mean - share) <= each.half_width for each in found) / len(found) > 0.93


def covered(correlation: float, trials: int = 300) -> float:
    """How often the interval of three runs of 2,400 requests holds the true share, for a two-state Markov chain with
    share 0.7 whose neighbours have this correlation."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(trials):
        runs = []
        for _ in range(3):
            fresh = rng.random(2400) >= correlation
            fresh[0] = True
            values = rng.random(2400) < 0.7
            runs.append(values[np.maximum.accumulate(np.where(fresh, np.arange(2400), 0))])
        found = of_share([Hits.among(run) for run in runs])
        hits += abs(found.mean - 0.7) <= found.half_width
    return hits / trials


@pytest.mark.parametrize("correlation", [0.0, 0.8, 0.95])
def test_the_interval_of_a_share_covers_the_truth(correlation: float) -> None:
    """Requests in a row are alike; the interval must still hold the truth about 95 times in 100 (2 s.e.: 2.5)."""
    assert 0.91 <= covered(correlation) <= 0.985


def test_differences_and_ratios() -> None:
    one, other = Estimate(0.9, 0.03), Estimate(0.45, 0.04)
    assert difference(one, other) == pytest.approx((0.45, 0.05))
    assert ratio(one, other) == pytest.approx((2.0, 2 * math.hypot(0.03 / 0.9, 0.04 / 0.45)))
    assert math.isnan(ratio(one, Estimate(0.0, 0.0)).mean)


def test_what_a_hard_seed_adds_to_both_sides_does_not_widen_their_difference() -> None:
    one, other = over_runs([3.0, 5.0, 9.0]), over_runs([2.0, 4.0, 8.0])
    assert difference(one, other) == pytest.approx((1.0, 0.0))
    assert ratio(over_runs([2.0, 4.0, 12.0]), over_runs([1.0, 2.0, 6.0])) == pytest.approx((2.0, 0.0))
    shares = of_share([Hits.among(np.arange(40) >= 20)]), of_share([Hits.among(np.arange(40) >= 18)])
    assert difference(*shares).half_width < math.hypot(*(share.half_width for share in shares))


def test_samples_of_other_numbers_of_runs_are_not_paired() -> None:
    one, other = over_runs([3.0, 5.0, 9.0]), over_runs([2.0, 4.0])
    assert difference(one, other).half_width == pytest.approx(math.hypot(one.half_width, other.half_width))


@pytest.mark.parametrize("compare", [difference, ratio])
def test_the_interval_of_a_comparison_covers_the_truth(compare: Callable[[Estimate, Estimate], Estimate]) -> None:
    """Two systems under common random numbers: a hard seed makes both slower. The truth lies inside 19 times of 20."""
    rng = np.random.default_rng(7)
    truth = 1.0 if compare is difference else 11 / 10
    inside = 0
    for _ in range(2000):
        hard = rng.normal(0, 1, 8)
        found = compare(
            over_runs((11 + hard + rng.normal(0, 0.3, 8)).tolist()),
            over_runs((10 + hard + rng.normal(0, 0.3, 8)).tolist()),
        )
        inside += abs(found.mean - truth) <= found.half_width
    assert 0.93 <= inside / 2000 <= 0.97


def test_a_model_without_requests_in_one_of_the_seeds() -> None:
    """It has no throughput there, no request to judge, and no latency, so none over all seeds either."""
    both, one = example(), run_of([1, 3], [1.5, 4], [2, 5], [3, 3], [F, F])
    limits = {"A": 1.0, "B": 1.0}
    runs = [measure(each, limits, None) for each in (replace(one, models=("A",)), both)]
    assert runs[0].models == runs[1].models == ("A", "B")
    assert estimate(runs, "goodput_per_s", "B").mean == pytest.approx((0 + runs[1].values["goodput_per_s"]["B"]) / 2)
    assert estimate(runs, "ttft_attainment", "B") == estimate(runs[1:], "ttft_attainment", "B")
    assert math.isnan(estimate(runs, "ttft_p50_s", "B").mean)
    assert estimate(runs, "ttft_attainment", "A").mean == pytest.approx((2 + 1) / (2 + 4))
