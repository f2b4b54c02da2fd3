"""Sleeping engines: worked examples of levels, limits and ends, and the limits under any sequence of calls."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fineserve_sim.policy.fleet.sleepers import Sleeper, Sleepers, Tier

NODE_OF = {0: 0, 1: 0, 2: 1, 3: 1}
ROOMY = dict.fromkeys(NODE_OF, 1000)
"""GPUs with so much memory that no process is too large."""


def sleeper(engine: int, model: str, *gpus: int, weights: int = 10, process: int = 1) -> Sleeper:
    return Sleeper(engine, model, gpus, process, weights)


def engines(ended: list[Sleeper]) -> list[int]:
    return [each.engine for each in ended]


def tiers(sleepers: Sleepers, *ids: int) -> list[Tier]:
    return [sleepers.tier(id) for id in ids]


def asleep(sleepers: Sleepers, *ones: Sleeper, free_bytes: Mapping[int, int] = ROOMY) -> list[int]:
    """All fall asleep, one after the other. Returns those that end."""
    return [id for one in ones for id in engines(sleepers.sleep(one, free_bytes))]


def test_weights_stay_in_host_memory_while_it_has_room_and_the_longest_asleep_lose_theirs() -> None:
    sleepers = Sleepers(NODE_OF, host_bytes=25)
    assert asleep(sleepers, sleeper(0, "a", 0), sleeper(1, "b", 1), sleeper(2, "c", 0)) == []
    assert tiers(sleepers, 0, 1, 2, 3) == [Tier.DISK, Tier.HOST, Tier.HOST, Tier.GONE]


def test_each_node_has_host_memory_of_its_own() -> None:
    sleepers = Sleepers(NODE_OF, host_bytes=10)
    asleep(sleepers, sleeper(0, "a", 0), sleeper(1, "b", 2))
    assert tiers(sleepers, 0, 1) == [Tier.HOST, Tier.HOST]


def test_a_model_larger_than_host_memory_sleeps_at_level_2_and_takes_no_weights_from_others() -> None:
    sleepers = Sleepers(NODE_OF, host_bytes=10)
    asleep(sleepers, sleeper(0, "a", 0), sleeper(1, "b", 1, weights=11))
    assert tiers(sleepers, 0, 1) == [Tier.HOST, Tier.DISK]


def test_without_host_memory_all_sleep_at_level_2() -> None:
    sleepers = Sleepers(NODE_OF, host_bytes=0)
    asleep(sleepers, sleeper(0, "a", 0))
    assert tiers(sleepers, 0) == [Tier.DISK]


def test_an_engine_wakes_where_it_slept_and_gives_its_host_memory_back() -> None:
    sleepers = Sleepers(NODE_OF, host_bytes=10)
    asleep(sleepers, one := sleeper(0, "a", 0))
    assert sleepers.wake("a", (1,)) == (Tier.GONE, None) == sleepers.wake("b", (0,))
    assert sleepers.wake("a", (0,)) == (Tier.HOST, one) and len(sleepers) == 0
    asleep(sleepers, sleeper(1, "b", 0), sleeper(2, "c", 1))
    assert tiers(sleepers, 0, 1, 2) == [Tier.GONE, Tier.DISK, Tier.HOST]
    assert sleepers.wake("b", (0,))[0] is Tier.DISK


def test_replicas_sleep_side_by_side_but_only_one_in_a_place() -> None:
    sleepers = Sleepers(NODE_OF, host_bytes=100)
    assert asleep(sleepers, sleeper(0, "a", 0), sleeper(1, "a", 1)) == []
    assert asleep(sleepers, sleeper(2, "a", 0)) == [0]
    assert tiers(sleepers, 0, 1, 2) == [Tier.GONE, Tier.HOST, Tier.HOST]


def test_the_longest_asleep_ends_where_a_gpu_has_too_many() -> None:
    sleepers = Sleepers(NODE_OF, host_bytes=100, processes=2)
    assert asleep(sleepers, sleeper(0, "a", 0), sleeper(1, "b", 0, 1), sleeper(2, "c", 1)) == []
    assert asleep(sleepers, sleeper(3, "d", 0, 1)) == [0, 1], "one on each GPU, of which the first went for GPU 0"
    assert [sleepers.process_bytes(gpu) for gpu in NODE_OF] == [1, 2, 0, 0]


def test_with_no_processes_no_engine_sleeps() -> None:
    sleepers = Sleepers(NODE_OF, host_bytes=100, processes=0)
    assert asleep(sleepers, sleeper(0, "a", 0)) == [] and 0 not in sleepers


def test_processes_take_half_of_what_would_be_free_at_most() -> None:
    sleepers = Sleepers(NODE_OF, host_bytes=100)
    assert asleep(sleepers, *(sleeper(id, f"{id}", 0, process=4) for id in range(3))) == []
    assert asleep(sleepers, sleeper(3, "d", 0, process=4), free_bytes={0: 25}) == [0]
    assert engines(sleepers.make_room(0, 24)) == [] and engines(sleepers.make_room(0, 23)) == [1]
    assert engines(sleepers.make_room(0, -5)) == [2, 3]


def test_an_engine_whose_process_is_too_large_is_gone_and_ends_no_other() -> None:
    sleepers = Sleepers(NODE_OF, host_bytes=10)
    asleep(sleepers, sleeper(0, "a", 0))
    assert asleep(sleepers, sleeper(1, "b", 0, 1, process=6), free_bytes={0: 100, 1: 11}) == []
    assert tiers(sleepers, 0, 1) == [Tier.HOST, Tier.GONE]


def test_a_lost_gpu_ends_its_sleepers() -> None:
    sleepers = Sleepers(NODE_OF, host_bytes=100)
    asleep(sleepers, sleeper(0, "a", 0, 1), sleeper(1, "b", 0), sleeper(2, "c", 1))
    assert engines(sleepers.lose(0)) == [0, 1] and len(sleepers) == 1


def test_limits_are_not_negative_and_nobody_falls_asleep_twice() -> None:
    with pytest.raises(ValueError, match="host_bytes=-1"):
        Sleepers(NODE_OF, -1)
    with pytest.raises(ValueError, match="processes=-1"):
        Sleepers(NODE_OF, 0, -1)
    sleepers = Sleepers(NODE_OF, 0)
    asleep(sleepers, sleeper(0, "a", 0))
    with pytest.raises(ValueError, match="engine 0 sleeps already"):
        asleep(sleepers, sleeper(0, "b", 0))


class Nights(RuleBasedStateMachine):
    """Against a list of who should be asleep."""

    def __init__(self) -> None:
        super().__init__()
        self.sleepers = Sleepers(NODE_OF, host_bytes=30, processes=3)
        self.asleep: list[Sleeper] = []  # the longest first
        self.given = 0

    def _ended(self, ended: list[Sleeper]) -> None:
        for one in ended:
            self.asleep.remove(one)

    @rule(
        model=st.sampled_from("abcd"),
        gpus=st.sampled_from([(0,), (1,), (0, 1), (2,), (2, 3)]),
        weights=st.integers(0, 40),
        process=st.integers(0, 20),
        free=st.integers(-5, 60),
    )
    def sleep(self, model: str, gpus: tuple[int, ...], weights: int, process: int, free: int) -> None:
        one = Sleeper(self.given, model, gpus, process, weights)
        self.given += 1
        ended = self.sleepers.sleep(one, dict.fromkeys(gpus, free))
        if 2 * process > free:
            assert not ended and one.engine not in self.sleepers
            return
        self.asleep.append(one)
        self._ended(ended)
        assert one in self.asleep and (self.sleepers.tier(one.engine) is Tier.HOST) == (weights <= 30)
        assert all(2 * self.sleepers.process_bytes(gpu) <= free for gpu in gpus)

    @rule(model=st.sampled_from("abcd"), gpus=st.sampled_from([(0,), (1,), (0, 1), (2,), (2, 3)]))
    def wake(self, model: str, gpus: tuple[int, ...]) -> None:
        there = [one for one in self.asleep if one.place == (model, gpus)]
        known = self.sleepers.tier(there[0].engine) if there else Tier.GONE
        tier, found = self.sleepers.wake(model, gpus)
        assert (tier, found) == (known, there[0] if there else None)
        self._ended(there)

    @rule(gpu=st.sampled_from([*NODE_OF]), free=st.integers(-5, 60))
    def make_room(self, gpu: int, free: int) -> None:
        before = [one for one in self.asleep if gpu in one.gpus]
        ended = self.sleepers.make_room(gpu, free)
        assert ended == before[: len(ended)], "the longest asleep first"
        assert not ended or 2 * sum(one.process_bytes for one in before[len(ended) - 1 :]) > free, "no more than needed"
        self._ended(ended)

    @rule(gpu=st.sampled_from([*NODE_OF]))
    def lose(self, gpu: int) -> None:
        self._ended(self.sleepers.lose(gpu))
        assert not any(gpu in one.gpus for one in self.asleep)

    @invariant()
    def books_agree(self) -> None:
        self.sleepers.check()
        assert len(self.sleepers) == len(self.asleep) and all(one.engine in self.sleepers for one in self.asleep)
        for gpu in NODE_OF:
            here = [one.process_bytes for one in self.asleep if gpu in one.gpus]
            assert len(here) <= 3 and self.sleepers.process_bytes(gpu) == sum(here)
        for node in (0, 1):
            mine = [one for one in self.asleep if NODE_OF[one.gpus[0]] == node]
            kept = [one.weight_bytes for one in mine if self.sleepers.tier(one.engine) is Tier.HOST]
            assert sum(kept) <= 30


TestNights = Nights.TestCase
