"""Links against closed forms: rates, priorities, chunks, and conservation under random traffic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.catalog import gpu
from fineserve_sim.cluster.clock import Clock, Kind, order_of
from fineserve_sim.cluster.engine.links import Link, Links
from fineserve_sim.cluster.scenario import Gpu

RATE = 100.0


def link() -> tuple[Clock, Link]:
    clock = Clock()
    return clock, Link(clock, RATE, 1)


def note(done: dict[str, float], name: str) -> Callable[[float], None]:
    return lambda now: done.__setitem__(name, now)


def at(clock: Clock, time_s: float, act: Callable[[], object]) -> None:
    clock.at(time_s, order_of(Kind.ARRIVAL, 0), lambda _: act())


def test_one_transfer_takes_its_bytes_over_the_rate() -> None:
    clock, wire = link()
    done: dict[str, float] = {}
    wire.send(250, 0, None, note(done, "a"))
    clock.run()
    assert done == {"a": 2.5} and wire.queued_bytes == 0


def test_first_come_first_served_among_equals() -> None:
    clock, wire = link()
    done: dict[str, float] = {}
    for name in "abc":
        wire.send(100, 0, 10, note(done, name))
    clock.run()
    assert done == pytest.approx({"a": 1.0, "b": 2.0, "c": 3.0})


@pytest.mark.parametrize(("chunk", "urgent_s"), [(10, 0.1), (50, 0.5), (None, 10.0)])
def test_an_urgent_transfer_waits_for_at_most_one_chunk(chunk: int | None, urgent_s: float) -> None:
    clock, wire = link()
    done: dict[str, float] = {}
    wire.send(1000, 5, chunk, note(done, "bulk"))
    at(clock, 0.05, lambda: wire.send(20, 0, None, note(done, "urgent")))
    clock.run()
    assert done["urgent"] == pytest.approx(urgent_s + 0.2)
    assert done["bulk"] == pytest.approx(10.2 if chunk else 10.0)


def test_a_cancelled_transfer_frees_the_link_after_its_chunk() -> None:
    clock, wire = link()
    done: dict[str, float] = {}
    bulk = wire.send(1000, 0, 100, note(done, "bulk"))
    wire.send(100, 0, None, note(done, "next"))
    at(clock, 1.5, bulk.cancel)
    clock.run()
    assert done == {"next": 3.0} and bulk.left_bytes == 800


def test_nothing_to_send_arrives_at_once_and_in_turn() -> None:
    clock, wire = link()
    done: dict[str, float] = {}
    wire.send(100, 0, None, note(done, "a"))
    wire.send(0, 0, None, note(done, "b"))
    clock.run()
    assert done == {"a": 1.0, "b": 1.0}


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 400), st.integers(0, 2), st.none() | st.integers(1, 90)),
        min_size=1,
        max_size=12,
    )
)
def test_a_link_never_idles_while_something_waits(traffic: list[tuple[int, int, int, int | None]]) -> None:
    clock, wire = link()
    done: dict[str, float] = {}
    for index, (start, size, priority, chunk) in enumerate(traffic):
        at(clock, float(start), lambda a=(size, priority, chunk), n=str(index): wire.send(*a, note(done, n)))  # type: ignore[misc]
    clock.run()
    free_s = 0.0
    for start, size, _, _ in sorted(traffic, key=lambda row: row[0]):
        free_s = max(free_s, start) + size / RATE
    assert len(done) == len(traffic)
    assert max(done.values()) == pytest.approx(free_s)
    assert wire.queued_bytes == 0
    for index, (start, size, _, _) in enumerate(traffic):
        assert done[str(index)] >= start + size / RATE - 1e-9


def test_nonsense_is_refused() -> None:
    clock, wire = link()
    with pytest.raises(ValueError, match="more than 0"):
        Link(clock, 0.0, 1)
    with pytest.raises(ValueError, match="chunks >= 1"):
        wire.send(10, 0, 0, lambda now: None)


def test_links_belong_to_gpus_and_a_group_has_the_rate_of_its_slowest_times_their_number() -> None:
    fast, slow = gpu("h100-sxm"), gpu("a100-80gb")
    table = Links(
        Clock(), [Gpu(0, 0, fast), Gpu(1, 0, slow), Gpu(2, 0, slow), Gpu(3, 1, fast, network_bytes_per_s=1e9)]
    )
    pair = table.of((0, 1))
    assert (
        pair.node.bytes_per_s == 2 * slow.peer_bytes_per_s and pair.from_host.bytes_per_s == 2 * slow.pcie_bytes_per_s
    )
    assert table.between((0, 1), (2,)) is pair.node, "GPUs of one node"
    assert (
        table.between((0, 1), (3,)) is pair.network
        and pair.network.bytes_per_s == 2 * Gpu(0, 0, fast).network_bytes_per_s
    )
    assert table.of((0, 1)) is pair and table.of((3,)).network.bytes_per_s == 1e9


def test_a_host_link_may_have_a_rate_of_its_own() -> None:
    links = Links(Clock(), [Gpu(0, 0, gpu("h100-sxm"))], host_bytes_per_s=5e9).of((0,))
    assert links.to_host.bytes_per_s == links.from_host.bytes_per_s == 5e9
