"""A radix tree over token prefixes (vTensor, section 5.2: the rTree).

Keys are sequences of block keys: one hashable item a KV block, equal for two sequences when they agree up to the end of that
block. Each item of a stored key carries a value, the block itself. Edges hold runs of items, so that a tree of n sequences,
stored or looked for, has fewer than 2 n nodes however long they are: a run is split where one of them leaves it.

What was not used for longest goes first: leaves are trimmed from their ends, so that a stored prefix never loses its
beginning before its end. Leaves wait for that in a heap, each with one entry. A use leaves the entry too old, which shows when
it reaches the top; so an eviction costs O(log leaves), amortised over uses, for each leaf that it trims. A leaf whose end is
held is set aside until it is offered again, however many are. A match or an insertion costs the length of its key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Node(Generic[K, V]):
    """A run of items after the path from the root; ``used`` is the tree's tick when it was last matched or stored, and
    ``queued`` says whether the heap of leaves has an entry for it."""

    __slots__ = ("children", "items", "parent", "queued", "used", "values")

    def __init__(self, items: Sequence[K], values: Sequence[V], parent: _Node[K, V] | None, used: int) -> None:
        self.queued = False
        self.items = list(items)
        self.values = list(values)
        self.parent = parent
        self.used = used
        self.children: dict[K, _Node[K, V]] = {}

    def common(self, key: Sequence[K], start: int) -> int:
        """How many items of the run agree with ``key`` from ``start`` on."""
        count = 0
        for mine, theirs in zip(self.items, key[start : start + len(self.items)], strict=False):
            if mine != theirs:
                break
            count += 1
        return count


class RadixTree(Generic[K, V]):
    """Stored key sequences with a value an item."""

    def __init__(self) -> None:
        self._root: _Node[K, V] = _Node((), (), None, 0)
        self._tick = 0
        self._size = 0
        self._leaves: list[tuple[int, int, _Node[K, V]]] = []  # a heap by ``used``, which may be too old here
        self._entries = itertools.count()
        self._held: dict[V, _Node[K, V]] = {}  # leaves that could not be trimmed, by their last value

    def __len__(self) -> int:
        """Items in the tree."""
        return self._size

    def match(self, key: Sequence[K]) -> list[V]:
        """The values of the longest stored prefix of ``key``; it counts as used now."""
        return [value for node in self._descend(key) for value in node.values]

    def insert(self, key: Sequence[K], values: Sequence[V]) -> int:
        """Store ``key``, one value an item. The first items that are there already keep their values; returns how many.

        Raises ValueError when there are not as many values as items.
        """
        if len(key) != len(values):
            raise ValueError(f"radix tree: {len(key)} items with {len(values)} values; give one value an item")
        shared, at = 0, self._root
        for at in self._descend(key):
            shared += len(at.items)
        if shared < len(key):
            leaf = at.children[key[shared]] = _Node(key[shared:], values[shared:], at, self._tick)
            self._queue(leaf)
            self._size += len(key) - shared
        return shared

    def evict(self, count: int, evictable: Callable[[V], bool]) -> list[V]:
        """Remove up to ``count`` items, ends of the least recently used leaves first, and return their values. An item that
        is not ``evictable`` stays, and all before it; it is asked for again once it was offered (see ``offer``)."""
        gone: list[V] = []
        while len(gone) < count and (leaf := self._oldest_leaf()) is not None:
            while leaf.values and len(gone) < count and evictable(leaf.values[-1]):
                gone.append(leaf.values.pop())
                last = leaf.items.pop()
            if not leaf.items:
                assert leaf.parent is not None
                del leaf.parent.children[last]
                self._queue(leaf.parent)
            elif len(gone) < count:
                self._held[leaf.values[-1]] = leaf
            else:
                self._queue(leaf)
        self._size -= len(gone)
        return gone

    def offer(self, value: V) -> None:
        """The item with this value has become evictable. Values that are offered must be distinct."""
        leaf = self._held.pop(value, None)
        if leaf is not None:
            self._queue(leaf)

    def values(self) -> list[V]:
        """All values, parents before children."""
        return [value for node in self._nodes() for value in node.values]

    def _descend(self, key: Sequence[K]) -> Iterator[_Node[K, V]]:
        """The nodes along ``key``, which are marked as used now. Where ``key`` leaves a run, the rest of it is not."""
        self._tick += 1
        node, start = self._root, 0
        while start < len(key):
            child = node.children.get(key[start])
            if child is None:
                return
            count = child.common(key, start)
            if count < len(child.items):
                self._split(child, count)
            child.used = self._tick
            yield child
            node, start = child, start + count

    def _split(self, node: _Node[K, V], at: int) -> None:
        """Cut a run in two: the node keeps the first ``at`` items, a new child takes the rest and the children."""
        rest: _Node[K, V] = _Node(node.items[at:], node.values[at:], node, node.used)
        rest.children = node.children
        for child in rest.children.values():
            child.parent = rest
        del node.items[at:], node.values[at:]
        node.children = {rest.items[0]: rest}
        self._queue(rest)

    def _queue(self, node: _Node[K, V]) -> None:
        """Give the heap an entry for a leaf."""
        if node.items and not node.children and not node.queued:
            node.queued = True
            heappush(self._leaves, (node.used, next(self._entries), node))

    def _oldest_leaf(self) -> _Node[K, V] | None:
        """Take the least recently used leaf from the heap; None when that is empty."""
        heap = self._leaves
        while heap:
            used, _, node = heap[0]
            if node.used != used and not node.children:
                heapreplace(heap, (node.used, next(self._entries), node))
                continue
            heappop(heap)
            node.queued = False
            if node.items and not node.children:
                return node
        return None

    def _nodes(self) -> Iterator[_Node[K, V]]:
        pending = [self._root]
        while pending:
            node = pending.pop()
            pending += node.children.values()
            if node.items:
                yield node

    def check(self) -> None:
        """Raise AssertionError if the tree contradicts itself."""
        size = 0
        for node in self._nodes():
            size += len(node.items)
            assert len(node.items) == len(node.values), "an item without a value"
            assert node.parent is not None and node.parent.children.get(node.items[0]) is node, "a lost node"
            assert node.children or node.queued or self._held.get(node.values[-1]) is node, (
                "a leaf that nobody can evict"
            )
        assert size == self._size, f"{size} items, {self._size} counted"
