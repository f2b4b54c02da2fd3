"""Shared by the tests of searches."""

from __future__ import annotations

from collections.abc import Callable

from fineserve_sim.planning.find import Told


def stopping_after(count: int) -> Callable[[Told], None]:
    """Ctrl-C at the better plan of this number."""
    calls = []

    def tell(told: Told) -> None:
        calls.append(told)
        if len(calls) == count:
            raise KeyboardInterrupt

    return tell
