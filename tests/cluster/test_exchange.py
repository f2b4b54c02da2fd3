"""What has to move when engines merge, by hand: three instances that had all six layers keep two each."""

from __future__ import annotations

import pytest

from fineserve_sim.cluster.engine.sequence import SequenceState
from fineserve_sim.cluster.fleet.exchange import Exchange

ALL = range(6)
HELD = {0: ALL, 1: ALL, 2: ALL}
OWN = {0: range(2), 1: range(2, 4), 2: range(4, 6)}


def sequence(index: int, tokens: int, *blocks: int) -> SequenceState:
    state = SequenceState(index, 0.0, tokens, 1)
    state.cached_tokens = tokens
    state.blocks = [list(blocks)] if blocks else ()
    return state


def test_without_names_all_tokens_move() -> None:
    first, second = sequence(0, 10), sequence(1, 7)
    exchange = Exchange([first, second], {first: (0,), second: (0,)}, HELD, 4)
    assert [exchange.tokens(each, 1, OWN[1]) for each in (first, second)] == [10, 7]
    assert list(exchange.followers()) == []


def test_a_shared_block_goes_to_an_instance_once_and_those_that_share_it_wait_for_it() -> None:
    first, second = sequence(0, 10, 1, 2, 3), sequence(1, 9, 1, 2, 4)
    exchange = Exchange([first, second], {first: (0,), second: (0,)}, HELD, 4)
    assert [exchange.tokens(each, 1, OWN[1]) for each in (first, second)] == [10, 1]
    exchange.sent(1, batch := [first])
    exchange.sent(1, [second])
    (follows,) = _all(exchange)
    assert follows == (batch, second) and batch == [first, second]


def test_an_instance_that_had_the_block_does_not_get_it() -> None:
    """The third one gets it from the first sequence that travels there, and the other waits for that."""
    first, second = sequence(0, 10, 1, 2, 3), sequence(1, 9, 1, 2, 4)
    exchange = Exchange([first, second], {first: (0,), second: (1,)}, HELD, 4)
    assert exchange.tokens(first, 1, OWN[1]) == 2 and exchange.tokens(second, 0, OWN[0]) == 1
    assert exchange.tokens(first, 2, OWN[2]) == 10 and exchange.tokens(second, 2, OWN[2]) == 1
    for receiver, travels in ((1, first), (0, second), (2, first), (2, second)):
        exchange.sent(receiver, [travels])
    assert _all(exchange) == [([first, second], second)]


def test_layers_that_an_instance_misses_of_a_block_move() -> None:
    """The second engine was a pipeline: its instance had one of the two layers that it keeps now."""
    first, second = sequence(0, 8, 1, 2), sequence(1, 8, 1, 2)
    held = {0: ALL, 1: range(3), 2: range(3, 6)}
    exchange = Exchange([first, second], {first: (0,), second: (1, 2)}, held, 4)
    assert exchange.tokens(first, 1, OWN[1]) == pytest.approx(4.0)
    assert exchange.tokens(second, 1, range(3, 4)) == 0


def _all(exchange: Exchange) -> list[tuple[list[SequenceState], SequenceState]]:
    found = []
    for batch, follower in exchange.followers():
        batch.append(follower)
        found.append((batch, follower))
    return found
