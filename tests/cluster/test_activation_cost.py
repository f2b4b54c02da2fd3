"""Activation: single loads against the closed form, shared links against hand-worked cases and max-min laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.cluster.fleet.loader import (
    SWITCH_S,
    ActivationCost,
    Loader,
    Loading,
    activation_cost,
    transfer_rates,
)

GB = 10**9
PLAIN = ActivationCost(overhead_s=1.0, gpu_bytes_per_s=10.0, node_bytes_per_s=40.0)
NODE_OF = {gpu: gpu // 8 for gpu in range(16)}


def run(loader: Loader) -> dict[int, float]:
    """When each engine is ready."""
    ready: dict[int, float] = {}
    while (now := loader.next_change_s()) != float("inf"):
        ready |= dict.fromkeys(loader.advance(now), now)
    return ready


def test_the_rates_give_back_the_latencies_that_they_come_from() -> None:
    """Inputs, not results: 14B in 1.3 s and 7.1 s, 70B on eight GPUs in 1.5 s (Prism, section 7.4)."""
    assert activation_cost().alone_s(29_540_000_000) == pytest.approx(1.3, rel=0.03)
    assert activation_cost(parallel_loading=False).alone_s(29_540_000_000) == pytest.approx(7.1, rel=0.03)
    assert activation_cost().alone_s(141_100_000_000 // 8, ranks=8) == pytest.approx(1.5, rel=0.03)


def test_without_a_pool_an_engine_starts_first() -> None:
    cold = activation_cost(engine_pool=False, engine_start_s=25.0)
    assert cold.alone_s(0) == pytest.approx(25.0 + SWITCH_S)


@given(st.integers(1, 100 * GB), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_alone_a_loader_takes_the_closed_form(shard_bytes: int, ranks: int, parallel: bool) -> None:
    cost = activation_cost(parallel_loading=parallel)
    loader = Loader(NODE_OF)
    loader.begin(0.0, 7, tuple(range(ranks)), shard_bytes, cost)
    assert run(loader)[7] == pytest.approx(cost.alone_s(shard_bytes, ranks))


def test_two_loads_to_one_gpu_share_its_link() -> None:
    """100 bytes at 10/s. Engine 0 is alone from 1 to 6 s (50 bytes), shares until its other 50 came at 5/s (16 s); then
    engine 1 has 50 bytes left at 10/s."""
    loader = Loader(NODE_OF)
    loader.begin(0.0, 0, (0,), 100, PLAIN)
    assert loader.next_change_s() == 1.0 and loader.advance(1.0) == []
    loader.begin(5.0, 1, (0,), 100, PLAIN)
    assert run(loader) == pytest.approx({0: 16.0, 1: 21.0})


def test_two_loads_to_one_node_share_its_rate() -> None:
    """Eight shards at 10/s would be 80/s: 40/s over eight links are 5/s each. A load to another node is not slowed."""
    loader = Loader(NODE_OF)
    loader.begin(0.0, 0, tuple(range(8)), 100, PLAIN)
    loader.begin(0.0, 1, (8,), 100, PLAIN)
    assert run(loader) == pytest.approx({0: 21.0, 1: 11.0})


def test_what_one_cannot_use_the_others_get() -> None:
    """Engines 0 and 1 share GPU 0: 5/s each. Engine 2 takes what the node has left for it, but no more than its link."""
    for node_bytes_per_s, rates in [(18.0, [5.0, 5.0, 8.0]), (40.0, [5.0, 5.0, 10.0])]:
        cost = ActivationCost(0.0, 10.0, node_bytes_per_s)
        loadings = [Loading(cost, gpus, 1) for gpus in [(0,), (0,), (1,)]]
        assert transfer_rates(loadings, NODE_OF) == pytest.approx(rates)


def test_media_share_the_link_of_a_gpu_and_nothing_else() -> None:
    """From disk 4/s to a GPU and 6/s to a node; from host memory 10/s, as fast as the link is. On GPU 0 weights from disk leave
    6/s or 7/s to those from host memory. A second load from disk to GPU 0 has half of what comes from disk there."""
    host, disk = ActivationCost(0.0, 10.0, float("inf")), ActivationCost(3.0, 4.0, 6.0)
    by_disk, by_host, beside = Loading(disk, (0,), 1), Loading(host, (0,), 1), Loading(disk, (1,), 1)
    assert transfer_rates([by_disk, by_host], NODE_OF) == pytest.approx([4.0, 6.0])
    assert transfer_rates([by_disk, by_host, beside], NODE_OF) == pytest.approx([3.0, 7.0, 3.0])
    assert transfer_rates([by_disk, Loading(disk, (0,), 1), by_host], NODE_OF) == pytest.approx([2.0, 2.0, 6.0])
    assert transfer_rates([by_disk, beside], NODE_OF) == pytest.approx([3.0, 3.0])
    assert transfer_rates([by_host, Loading(host, (0, 1), 1), Loading(host, (1,), 1)], NODE_OF) == pytest.approx(
        [5.0] * 3
    )


@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 2), min_size=1)), max_size=6), st.floats(1, 30))
def test_media_share_links_max_min_fairly(drawn: list[tuple[bool, set[int]]], node_bytes_per_s: float) -> None:
    """From host memory (True) and from disk, on three GPUs: each loading goes over a full link on which nobody is faster."""
    cost = {True: ActivationCost(0.0, 10.0, float("inf")), False: ActivationCost(0.0, 4.0, node_bytes_per_s)}
    rates = transfer_rates([Loading(cost[host], tuple(sorted(gpus)), 1) for host, gpus in drawn], NODE_OF)
    links = [(node_bytes_per_s, [(index, len(gpus)) for index, (host, gpus) in enumerate(drawn) if not host])]
    for gpu in range(3):
        here = [index for index, (_, gpus) in enumerate(drawn) if gpu in gpus]
        links += [(10.0, [(index, 1) for index in here]), (4.0, [(index, 1) for index in here if not drawn[index][0]])]
    held: set[int] = set()
    for most, users in links:
        carried = sum(rates[index] * shards for index, shards in users)
        assert carried <= most * (1 + 1e-9)
        if users and carried >= most * (1 - 1e-9):
            fastest = max(rates[index] for index, _ in users)
            held |= {index for index, _ in users if rates[index] >= fastest * (1 - 1e-9)}
    assert held == set(range(len(drawn)))


def test_infinite_rates_leave_the_overhead() -> None:
    """A QLM swap: one time, whatever the model, and side by side."""
    swap = ActivationCost(30.0, float("inf"), float("inf"))
    loader = Loader(NODE_OF)
    loader.begin(0.0, 0, (0,), 100, swap)
    loader.begin(5.0, 1, (0, 1), 100, swap)
    assert run(loader) == {0: 30.0, 1: 35.0}


def test_a_cancelled_load_leaves_its_share_to_others() -> None:
    loader = Loader(NODE_OF)
    loader.begin(0.0, 0, (0,), 100, PLAIN)
    loader.begin(0.0, 1, (0,), 100, PLAIN)
    loader.advance(1.0)
    loader.cancel(3.0, 0)  # engine 1 has 10 of its bytes
    assert run(loader) == pytest.approx({1: 12.0})
    loader.cancel(20.0, 5)


def test_an_end_at_the_very_moment_of_a_beginning_is_not_lost() -> None:
    loader = Loader(NODE_OF)
    loader.begin(0.0, 0, (0,), 100, PLAIN)
    loader.advance(1.0)
    loader.begin(11.0, 1, (1,), 10, PLAIN)
    assert loader.next_change_s() == 11.0 and loader.advance(11.0) == [0]
    with pytest.raises(ValueError, match="engine 1 loads already"):
        loader.begin(11.0, 1, (1,), 10, PLAIN)


groups_strategy = st.lists(
    st.integers(0, 1).flatmap(
        lambda node: st.sets(st.integers(8 * node, 8 * node + 7), min_size=1, max_size=8).map(
            lambda gpus: tuple(sorted(gpus))
        )
    ),
    max_size=6,
)


@given(groups_strategy, st.floats(1, 100))
def test_no_link_carries_more_than_it_can_and_everybody_is_held_by_a_full_one(
    groups: list[tuple[int, ...]], node_bytes_per_s: float
) -> None:
    """Max-min fairness: each loading goes over a full link on which nobody is faster."""
    cost = ActivationCost(0.0, 10.0, node_bytes_per_s)
    loadings = [Loading(cost, gpus, 1) for gpus in groups]
    rates = transfer_rates(loadings, NODE_OF)

    def users(gpu: int | None, node: int) -> list[tuple[int, int]]:
        """(loading, how many of its shards) over the link of a GPU, or of the node."""
        return [
            (index, 1 if gpu is not None else len(loading.gpus))
            for index, loading in enumerate(loadings)
            if (gpu in loading.gpus if gpu is not None else NODE_OF[loading.gpus[0]] == node)
        ]

    held: set[int] = set()
    for node in (0, 1):
        for gpu, most in [(None, node_bytes_per_s), *((8 * node + rank, 10.0) for rank in range(8))]:
            here = users(gpu, node)
            carried = sum(rates[index] * shards for index, shards in here)
            assert carried <= most * (1 + 1e-9)
            if here and carried >= most * (1 - 1e-9):
                fastest = max(rates[index] for index, _ in here)
                held |= {index for index, _ in here if rates[index] >= fastest * (1 - 1e-9)}
    assert held == set(range(len(loadings)))
