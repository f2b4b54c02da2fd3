"""Sequences of a group of instances.

They differ from those of an engine alone (``cluster/sequence.py``): they move, in the middle of decoding, between lanes,
groups and host memory, and hold a number of KV blocks rather than blocks with names, because a group may change the bytes
behind them.
"""

from __future__ import annotations

from fineserve_sim.cluster.sequence import BaseSequence


class Sequence(BaseSequence):
    """One request inside the cluster.

    ``blocks`` are its KV blocks in the group, ``host_blocks`` those swapped out. ``cached_tokens`` may have their KV under way
    in a microbatch: ``in_flight`` counts its prompt chunks in microbatches, ``due`` the transfers that it waits for.
    """

    __slots__ = ("blocks", "due", "host_blocks", "in_flight")

    def __init__(self, index: int, arrival_s: float, prompt_tokens: int, output_tokens: int) -> None:
        super().__init__(index, arrival_s, prompt_tokens, output_tokens)
        self.blocks = 0
        self.host_blocks = 0
        self.in_flight = 0
        self.due = 0

    @property
    def decodes(self) -> bool:
        """Its prefill is done. Asked of a sequence outside ``Decodes``."""
        return self.cached_tokens >= self.target_tokens

    def lose_kv(self) -> None:
        """Its KV is gone: prompt and generated tokens are to be prefilled (again)."""
        self.target_tokens = self.prompt_tokens + self.generated_tokens
        self.cached_tokens = 0
        self.host_blocks = 0
        self.in_flight = 0
        self.due = 0
        self.preempted = True


def by_arrival(sequence: Sequence) -> tuple[float, int]:
    return sequence.arrival_s, sequence.index
