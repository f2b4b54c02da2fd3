"""Records of prefixes: worked examples, and any sequence of calls against a plain list of records."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.memory.prefix import SharedBlocks

Keys = tuple[int, ...]


def keys_of(word: str) -> Keys:
    """A key says all of a prefix."""
    return tuple(hash(word[: end + 1]) for end in range(len(word)))


def ended(shared: SharedBlocks, word: str, blocks: list[int]) -> None:
    """A sequence of these blocks came and went."""
    shared.add(blocks)
    shared.record(keys_of(word), blocks)
    shared.drop(blocks)


def test_the_longest_prefix_is_found_and_held() -> None:
    shared = SharedBlocks()
    assert shared.match(keys_of("abc")) == []
    ended(shared, "abcd", [1, 2, 3, 4])
    assert shared.match(keys_of("abcx")) == [1, 2, 3] and shared.match(keys_of("bcd")) == []
    assert [shared.references(block) for block in (1, 3, 4, 5)] == [2, 2, 1, 0] and shared.evictable == 1


def test_a_fork_keeps_the_shared_part_once() -> None:
    shared = SharedBlocks()
    ended(shared, "abcd", [1, 2, 3, 4])
    ended(shared, "abxy", [10, 20, 30, 40])
    assert len(shared) == shared.evictable == 6
    assert shared.match(keys_of("abxy")) == [1, 2, 30, 40]
    shared.check()


def test_the_end_of_what_was_not_used_for_longest_goes_first() -> None:
    shared = SharedBlocks()
    ended(shared, "abc", [1, 2, 3])
    ended(shared, "abd", [10, 20, 30])
    ended(shared, "xy", [7, 8])
    shared.drop(shared.match(keys_of("abc")))
    assert shared.evict(1) == [30] and shared.evict(1) == [8]
    held = shared.match(keys_of("ab"))
    assert shared.evict(9) == [7, 3] and shared.evict(9) == []
    shared.drop(held)
    assert shared.evict(9) == [2, 1] and len(shared) == 0


@pytest.mark.parametrize("use", ["match", "record"])
def test_the_rest_of_a_sequence_that_was_left_is_not_used(use: str) -> None:
    """c and d came before x and y, and only a and b are used after them."""
    shared = SharedBlocks()
    ended(shared, "abcd", [1, 2, 3, 4])
    ended(shared, "xy", [5, 6])
    if use == "match":
        shared.drop(shared.match(keys_of("abz")))
    else:
        ended(shared, "abz", [7, 8, 9])
    assert shared.evict(4) == [4, 3, 6, 5]


def test_what_nobody_holds_can_go_though_its_end_is_held() -> None:
    """Two sequences of one prefix ran side by side: the records are the blocks of the first, and the end is the second's."""
    shared = SharedBlocks()
    shared.add([1, 2, 10, 20, 30])
    shared.record(keys_of("ab"), [1, 2])
    shared.record(keys_of("abc"), [10, 20, 30])
    assert shared.drop([1, 2]) == [] and shared.evictable == 2
    assert shared.evict(2) == [2, 1] and shared.match(keys_of("abc")) == []
    assert shared.drop([10, 20, 30]) == [10, 20] and shared.evict(1) == [30]


STEPS = st.tuples(
    st.sampled_from(["begin", "keep", "end", "lose", "evict"]), st.text("ab", max_size=6), st.integers(0, 6)
)


class Literal:
    """Records as a list, all of which an eviction looks through."""

    def __init__(self) -> None:
        self.records: dict[str, list[int]] = {}  # by prefix: block, last use
        self.ticks = count()

    def use(self, word: str, blocks: list[int]) -> None:
        now = next(self.ticks)
        for end, block in enumerate(blocks):
            self.records.setdefault(word[: end + 1], [block, now])[1] = now

    def match(self, word: str) -> list[int]:
        known = 0
        while known < len(word) and word[: known + 1] in self.records:
            known += 1
        blocks = [self.records[word[: end + 1]][0] for end in range(known)]
        self.use(word, blocks)
        return blocks

    def evict(self, number: int, held: set[int]) -> list[int]:
        idle = [(used, -len(prefix), prefix) for prefix, (block, used) in self.records.items() if block not in held]
        return [self.records.pop(prefix)[0] for _, _, prefix in sorted(idle)[:number]]


@given(st.lists(STEPS, max_size=60))
def test_runs_of_idle_records_go_as_a_look_through_all_of_them_says(steps: list[tuple[str, str, int]]) -> None:
    """Same blocks in the same order, while sequences come, keep what they computed, end or lose it."""
    shared, literal, made = SharedBlocks(), Literal(), count()
    running: list[tuple[str, list[int]]] = []
    for step, word, number in steps:
        if step == "begin":
            found = shared.match(keys_of(word))
            assert found == literal.match(word)
            new = [next(made) for _ in range(len(word) - len(found) + number)]
            shared.add(new)
            running.append((word, found + new))
        elif step == "evict":
            held = {block for _, blocks in running for block in blocks}
            assert shared.evict(number) == literal.evict(number, held)
        elif running:
            own, blocks = running[number % len(running)]
            if step != "lose":
                shared.record(keys_of(own), blocks)
                literal.use(own, blocks[: len(own)])
            if step != "keep":
                del running[number % len(running)]
                shared.drop(blocks)
        shared.check()
        assert len(shared) == len(
            {block for _, blocks in running for block in blocks} | {block for block, _ in literal.records.values()}
        )
