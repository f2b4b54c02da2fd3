"""The set of slabs, against a plain set of numbers."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.memory.slab_set import WORD, SlabSet

SLABS = 3 * WORD
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "add_all", "remove", "pop", "take"]), st.sets(st.integers(0, SLABS - 1))),
    max_size=20,
)


@given(st.integers(0, SLABS), OPERATIONS, st.randoms())
def test_it_has_what_a_set_has_and_gives_the_lowest_first(
    first: int, operations: list[tuple[str, set[int]]], order: Random
) -> None:
    slabs, plain = SlabSet(SLABS, range(first, SLABS)), set(range(first, SLABS))
    for name, chosen in operations:
        if name == "add":
            for slab in chosen - plain:
                slabs.add(slab)
            plain |= chosen
        elif name == "add_all":
            new = sorted(chosen - plain, key=lambda _: order.random())
            slabs.add_all(new)
            plain |= chosen
        elif name == "remove":
            for slab in chosen & plain:
                slabs.remove(slab)
            plain -= chosen
        elif name == "pop" and plain:
            assert slabs.pop() == min(plain)
            plain.remove(min(plain))
        elif name == "take":
            lowest = sorted(plain)[: len(chosen)]
            assert slabs.take(len(lowest)) == lowest
            plain -= set(lowest)
        assert slabs.ids() == sorted(plain)
        assert slabs.size == len(plain)
