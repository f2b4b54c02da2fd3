"""Marginal memory efficiency: the slope of a sweep, and the properties of the scores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.interfaces import ModelDemand
from fineserve_sim.policy.placement.mme import marginal_efficiency, mme_slope, score_mean

GIB = 2**30

efficiency = st.floats(1e-6, 1.0)
efficiencies = st.lists(efficiency, min_size=1, max_size=8)
remaining = st.integers(1, 80 * GIB)


def test_slope_of_a_straight_line_is_exact_in_any_order() -> None:
    assert mme_slope([4000, 1000, 2000], [460.0, 160.0, 260.0]) == pytest.approx(0.1)


def test_points_past_the_bend_do_not_flatten_the_slope() -> None:
    pools = [1000, 2000, 3000, 4000, 5000]
    assert mme_slope(pools, [100, 200, 300, 310, 310]) == pytest.approx(0.1)
    assert mme_slope(pools[::-1], [310, 310, 300, 200, 100]) == pytest.approx(0.1)
    assert mme_slope(pools, [100, 200, 300, 360, 420]) == pytest.approx(0.08)  # slopes over half the first all count


@given(
    slope=st.floats(1e-6, 10),
    offset=st.floats(0, 1e4),
    pools=st.lists(st.integers(1, 10**6), min_size=3, max_size=10, unique=True),
    wanted=st.integers(2, 10),
)
def test_finds_the_slope_before_a_sharp_saturation(slope: float, offset: float, pools: list[int], wanted: int) -> None:
    pools.sort()
    knee = pools[min(wanted, len(pools)) - 1]
    tokens = [offset + slope * min(pool, knee) * 1.0 for pool in pools]
    if slope * (pools[1] - pools[0]) > 1e-3 * (1 + offset):  # else the rise drowns in rounding
        assert mme_slope(pools, tokens) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize(
    ("pools", "tokens", "message"),
    [
        ([1000], [100.0], "at least two points"),
        ([1000, 1000], [100.0, 90.0], "same pool size"),
        ([1000, 2000], [100.0, 100.0], "do not grow"),
        ([1000, 2000], [100.0], "shorter"),
    ],
)
def test_a_sweep_without_a_slope_is_refused(pools: list[int], tokens: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mme_slope(pools, tokens)


def test_without_a_profile_a_model_gains_one_token_per_token_size() -> None:
    def model(token_bytes: int, mme: float | None = None) -> ModelDemand:
        return ModelDemand("m", 1.0, 1.0, 1, 10, token_bytes, mme_tokens_per_byte=mme)

    assert marginal_efficiency(model(131_072)) == 1 / 131_072
    assert marginal_efficiency(model(131_072, mme=0.5)) == 0.5
    fp16, fp8, qoq = (marginal_efficiency(model(kib * 1024)) for kib in (128, 64, 34))
    assert qoq > fp8 > fp16


@given(remaining, efficiencies, efficiency, efficiency)
def test_mean_score_grows_with_the_efficiency_of_the_new_model(
    remaining_bytes: int, residents: list[float], one: float, other: float
) -> None:
    """Claim FS-eq3-props (i)."""
    low, high = sorted((one, other))
    assert score_mean(remaining_bytes, [*residents, low]) <= score_mean(remaining_bytes, [*residents, high])


@given(remaining, efficiency, st.integers(1, 8), st.integers(1, 8), st.floats(1.01, 100))
def test_mean_score_rises_more_where_fewer_models_reside(
    remaining_bytes: int, average: float, one: int, other: int, factor: float
) -> None:
    """Claim FS-eq3-props (ii): residents with the same average, a new model that is more efficient than they."""
    few, many = min(one, other), max(one, other) + 1

    def rise(residents: int) -> float:
        group = [average] * residents
        return score_mean(remaining_bytes, [*group, average * factor]) - score_mean(remaining_bytes, group)

    assert rise(few) > rise(many)


@given(remaining, efficiencies, efficiency, st.floats(0, 10))
def test_a_huge_efficiency_is_damped_by_the_number_of_models(
    remaining_bytes: int, residents: list[float], mu: float, extra: float
) -> None:
    """Claim FS-eq3-props (iii): of a gain in mu, only 1/n reaches the score."""
    gain = score_mean(remaining_bytes, [*residents, mu + extra]) - score_mean(remaining_bytes, [*residents, mu])
    expected = remaining_bytes * extra / (len(residents) + 1)
    assert gain == pytest.approx(expected, rel=1e-6, abs=1e-9 * remaining_bytes)


@given(remaining, efficiencies, st.data())
def test_exact_score_is_the_best_split_and_mean_score_the_equal_one(
    remaining_bytes: int, mus: list[float], data: st.DataObject
) -> None:
    shares = [data.draw(st.floats(0.01, 1)) for _ in mus]
    split = [remaining_bytes * share / sum(shares) for share in shares]
    gained = sum(mu * part for mu, part in zip(mus, split, strict=True))
    assert gained <= remaining_bytes * max(mus) * (1 + 1e-9)
    equal = sum(mu * remaining_bytes / len(mus) for mu in mus)
    assert score_mean(remaining_bytes, mus) == pytest.approx(equal)
