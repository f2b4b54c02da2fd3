"""The prefix cache in host memory: worked examples, and any sequence of calls against a plain list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.memory.host_cache import HostCache, Place


def keys_of(word: str) -> tuple[int, ...]:
    """A key says all of a prefix."""
    return tuple(hash(word[: end + 1]) for end in range(len(word)))


def kept(cache: HostCache, word: str) -> None:
    cache.written(cache.write(keys_of(word)))


def test_blocks_are_found_once_they_are_written() -> None:
    cache = HostCache(8)
    coming = cache.write(keys_of("abc"))
    assert len(coming) == len(cache) == 3 and cache.match(keys_of("abc"), 0) == 0
    cache.written(coming)
    assert cache.match(keys_of("abcx"), 0) == 3 and cache.match(keys_of("abcx"), 2) == 1
    assert cache.match(keys_of("xbc"), 0) == 0 and cache.write(keys_of("abc")) == []


def test_the_least_recently_used_goes_first_and_ends_before_beginnings() -> None:
    cache = HostCache(4)
    kept(cache, "ab")
    kept(cache, "cd")
    kept(cache, "ab")
    kept(cache, "x")
    assert [cache.match(keys_of(word), 0) for word in ("ab", "cd", "x")] == [2, 1, 1]


def test_what_is_read_or_on_its_way_stays() -> None:
    cache = HostCache(3)
    kept(cache, "ab")
    cache.read(keys_of("ab"), 0)
    assert len(cache.write(keys_of("xyz"))) == 1, "the third is all the room there is"
    assert cache.match(keys_of("ab"), 0) == 2 and cache.write(keys_of("q")) == []
    cache.let_go(keys_of("ab"), 0)
    assert len(cache.write(keys_of("q"))) == 1 and cache.match(keys_of("ab"), 0) == 1


def test_a_prefix_longer_than_the_cache_is_kept_as_far_as_there_is_room() -> None:
    cache = HostCache(3)
    kept(cache, "abcdef")
    assert cache.match(keys_of("abcdef"), 0) == 3
    kept(cache, "abcdef")
    assert cache.match(keys_of("abcdef"), 0) == 3


def test_no_room_keeps_nothing_and_a_negative_one_cannot_be() -> None:
    assert HostCache(0).write(keys_of("abc")) == []
    with pytest.raises(ValueError, match="-1 blocks"):
        HostCache(-1)


class Plain:
    """The same by a list of (place, written, readers), the next to go first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: list[list[object]] = []

    def find(self, place: Place) -> list[object] | None:
        return next((block for block in self.blocks if block[0] == place), None)

    def use(self, keys: tuple[int, ...]) -> None:
        for place in reversed([*enumerate(keys)]):
            if block := self.find(place):
                self.blocks.remove(block)
                self.blocks.append(block)

    def write(self, keys: tuple[int, ...]) -> list[Place]:
        self.use(keys)
        new = []
        for place in [place for place in enumerate(keys) if not self.find(place)]:
            if len(self.blocks) >= self.capacity:
                idle = [b for b in self.blocks if b[1] and not b[2] and b[0] not in set(enumerate(keys))]
                if not idle:
                    break
                self.blocks.remove(idle[0])
            self.blocks.append([place, False, 0])
            new.append(place)
        self.use(keys)
        return new


WORDS = st.text("ab", min_size=1, max_size=5)


@given(st.integers(0, 7), st.lists(st.tuples(st.sampled_from(["write", "land", "read", "let go"]), WORDS), max_size=40))
def test_any_calls_do_what_a_plain_list_does(capacity: int, calls: list[tuple[str, str]]) -> None:
    cache, plain = HostCache(capacity), Plain(capacity)
    coming: list[list[Place]] = []
    reading: list[tuple[int, ...]] = []
    for call, word in calls:
        keys = keys_of(word)
        if call == "write":
            coming.append(cache.write(keys))
            assert coming[-1] == plain.write(keys)
        elif call == "land" and coming:
            places = coming.pop(0)
            cache.written(places)
            for place in places:
                plain.find(place)[1] = True  # type: ignore[index]
        elif call == "read":
            reading.append(keys[: cache.match(keys, 0)])
            cache.read(reading[-1], 0)
            plain.use(reading[-1])
            for place in enumerate(reading[-1]):
                plain.find(place)[2] += 1  # type: ignore[index, operator]
        elif call == "let go" and reading:
            held = reading.pop(0)
            cache.let_go(held, 0)
            for place in enumerate(held):
                plain.find(place)[2] -= 1  # type: ignore[index, operator]
        cache.check()
        assert len(cache) == len(plain.blocks) <= capacity
