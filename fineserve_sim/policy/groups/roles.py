"""Prefill and decode on different engines (DistServe, vLLM's KV connectors): the role of each engine, and the engine where a
request goes on.

A request is prefilled at one engine. Its KV then goes to another engine, where it decodes. Until that has room, the KV stays
where it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from fineserve_sim.policy.groups.dispatch import GroupEngine, Queued, Rank, Ranked


@dataclass(frozen=True, slots=True)
class Roles:
    """The first ``prefill`` instances prefill, all others decode."""

    prefill: int

    def prefills(self, engine: GroupEngine) -> bool:
        """Whether the engine prefills."""
        return engine.instances[0] < self.prefill


def split_of(instances: int, prefill: int, decode: int) -> int:
    """How many of the instances prefill, in parts of ``prefill`` to ``decode``, rounded. Each role has one at least.

    Raises ValueError for fewer than two instances.
    """
    if instances < 2:
        raise ValueError(f"prefill and decode need an instance each; there is {instances}")
    parts = prefill + decode
    return min(max(1, (2 * instances * prefill + parts) // (2 * parts)), instances - 1)


def most_free_blocks(engine: GroupEngine, queued: Queued) -> Rank:
    """Rank engines by KV memory that no request holds or waits for, the most first."""
    return (engine.load.queued_blocks - engine.load.free_blocks,)


def decode_router() -> Ranked:
    """Chooses where a prefilled request decodes."""
    return Ranked(most_free_blocks)
