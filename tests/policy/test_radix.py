"""The radix tree: worked examples, and a state machine against a plain list of stored keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fineserve_sim.policy.memory.radix import RadixTree


def test_the_deepest_prefix_is_found_inside_and_at_the_end_of_runs() -> None:
    tree: RadixTree[str, int] = RadixTree()
    assert tree.match("abc") == []
    assert tree.insert("abcd", [1, 2, 3, 4]) == 0
    assert tree.match("abcx") == [1, 2, 3] and tree.match("abcde") == [1, 2, 3, 4] and tree.match("bcd") == []


def test_a_fork_keeps_the_shared_part_once() -> None:
    tree: RadixTree[str, int] = RadixTree()
    tree.insert("abcd", [1, 2, 3, 4])
    assert tree.insert("abxy", [10, 20, 30, 40]) == 2
    assert len(tree) == 6
    assert tree.match("abxy") == [1, 2, 30, 40] and tree.match("abcd") == [1, 2, 3, 4]
    assert tree.insert("ab", [0, 0]) == 2 and tree.insert("", []) == 0
    tree.check()


def test_a_longer_sequence_continues_a_stored_one() -> None:
    """The next turn of a chat."""
    tree: RadixTree[int, int] = RadixTree()
    tree.insert([1, 2], [1, 2])
    assert tree.insert([1, 2, 3], [7, 8, 9]) == 2
    assert tree.match([1, 2, 3, 4]) == [1, 2, 9]


def test_the_end_of_what_was_not_used_for_longest_goes_first() -> None:
    tree: RadixTree[str, str] = RadixTree()
    for word in ("abc", "abd", "xy"):
        tree.insert(word, list(word))
    tree.match("abc")
    assert tree.evict(1, lambda _: True) == ["d"]
    assert tree.evict(1, lambda _: True) == ["y"]
    assert tree.evict(9, lambda value: value != "b") == ["x", "c"]  # b is held, and a before it
    assert tree.match("abc") == ["a", "b"]
    assert tree.evict(9, lambda _: True) == []  # nobody said that b is free again
    tree.offer("b")
    assert tree.evict(9, lambda _: True) == ["b", "a"] and len(tree) == 0
    tree.check()


@pytest.mark.parametrize("use", ["match", "insert"])
def test_the_rest_of_a_run_that_was_left_is_not_used(use: str) -> None:
    """c and d were stored before x and y, and only a and b are used after them."""
    tree: RadixTree[str, str] = RadixTree()
    for word in ("abcd", "xy"):
        tree.insert(word, list(word))
    if use == "match":
        assert tree.match("abz") == ["a", "b"]
    else:
        tree.insert("abz", list("abz"))
    assert tree.evict(2, lambda _: True) == ["d", "c"]
    assert tree.evict(2, lambda _: True) == ["y", "x"]


def test_one_value_an_item() -> None:
    with pytest.raises(ValueError, match="2 items with 1 values"):
        RadixTree[str, int]().insert("ab", [1])


WORDS = st.lists(st.sampled_from("abc"), max_size=6).map(tuple)


class RadixMachine(RuleBasedStateMachine):
    """Against a dict from every stored prefix to its value, and the last use of each."""

    @initialize()
    def start(self) -> None:
        self.tree: RadixTree[str, int] = RadixTree()
        self.stored: dict[tuple[str, ...], int] = {}
        self.values = 0

    def known(self, word: tuple[str, ...]) -> list[int]:
        prefixes = [word[: length + 1] for length in range(len(word))]
        return [self.stored[prefix] for prefix in prefixes if prefix in self.stored]

    @rule(word=WORDS)
    def insert(self, word: tuple[str, ...]) -> None:
        values = list(range(self.values, self.values + len(word)))
        self.values += len(word)
        shared = len(self.known(word))
        assert self.tree.insert(word, values) == shared
        for index in range(shared, len(word)):
            self.stored[word[: index + 1]] = values[index]

    @rule(word=WORDS)
    def match(self, word: tuple[str, ...]) -> None:
        assert self.tree.match(word) == self.known(word)

    @rule(count=st.integers(0, 5), odd_only=st.booleans())
    def evict(self, count: int, odd_only: bool) -> None:
        gone = self.tree.evict(count, lambda value: not odd_only or value % 2 == 1)
        for value in self.tree.values():
            self.tree.offer(value)  # who may go differs from call to call
        for value in gone:
            (prefix,) = [prefix for prefix, stored in self.stored.items() if stored == value]
            assert not any(other[:-1] == prefix for other in self.stored)  # an end, never a middle
            assert not odd_only or value % 2 == 1
            del self.stored[prefix]
        ends = [v for p, v in self.stored.items() if not any(other[:-1] == p for other in self.stored)]
        assert len(gone) == count or not any(not odd_only or value % 2 == 1 for value in ends)

    @invariant()
    def agrees(self) -> None:
        self.tree.check()
        assert len(self.tree) == len(self.stored)
        assert sorted(self.tree.values()) == sorted(self.stored.values())


TestRadix = RadixMachine.TestCase


class LiteralTree(RadixTree[str, int]):
    """Looks through all leaves for the one that was not used for longest."""

    def evict(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        gone: list[int] = []
        while len(gone) < count:
            leaves = [node for node in self._nodes() if not node.children and evictable(node.values[-1])]
            if not leaves:
                break
            leaf = min(leaves, key=lambda leaf: leaf.used)
            while leaf.values and len(gone) < count and evictable(leaf.values[-1]):
                gone.append(leaf.values.pop())
                last = leaf.items.pop()
                if not leaf.items and leaf.parent is not None:
                    del leaf.parent.children[last]
        self._size -= len(gone)
        return gone


STEPS = st.tuples(st.sampled_from(["insert", "match", "hold", "offer", "evict"]), WORDS, st.integers(0, 6))


@pytest.mark.pure_python
@given(st.lists(STEPS, max_size=60))
def test_the_heap_evicts_what_a_look_through_all_leaves_would(steps: list[tuple[str, tuple[str, ...], int]]) -> None:
    """Same order, with records held, used again, forked and offered in between."""
    fast: RadixTree[str, int] = RadixTree()
    literal = LiteralTree()
    held: set[int] = set()
    made = itertools.count()
    for step, word, number in steps:
        if step == "insert":
            values = [next(made) for _ in word]
            assert fast.insert(word, values) == literal.insert(word, values)
        elif step in ("match", "hold"):
            found = fast.match(word)
            assert found == literal.match(word)
            held.update(found if step == "hold" else ())
        elif step == "offer":
            for value in sorted(held)[:number]:
                held.remove(value)
                fast.offer(value)
        else:
            assert fast.evict(number, lambda v: v not in held) == literal.evict(number, lambda v: v not in held)
        assert sorted(fast.values()) == sorted(literal.values())
    fast.check()
    held.clear()
    for value in fast.values():
        fast.offer(value)
    assert fast.evict(10**6, lambda _: True) == literal.evict(10**6, lambda _: True)
    assert len(fast) == 0
