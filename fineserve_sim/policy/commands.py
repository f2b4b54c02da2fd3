"""What the controller tells its driver to do."""

from __future__ import annotations

from typing import NamedTuple


class Dispatch(NamedTuple):
    """Hand the request to the engine: it may prefill it from the next iteration on."""

    request_id: int
    engine: int


class Drop(NamedTuple):
    """Give the request up: its deadline cannot be met any more."""

    request_id: int
    reason: str


class Reject(NamedTuple):
    """Refuse the request at the door: no engine could ever serve it."""

    request_id: int
    reason: str


Command = Dispatch | Drop | Reject
