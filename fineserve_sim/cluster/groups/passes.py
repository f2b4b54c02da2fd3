"""A microbatch on its way through the stages of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fineserve_sim.cluster.groups.forming import PromptChunk
from fineserve_sim.cluster.groups.queue import Lane

if TYPE_CHECKING:
    from fineserve_sim.cluster.groups.group import Group

ACTIVATION, KV, WEIGHTS = 0, 1, 2
"""Priorities on links when transfers are coordinated."""


class Microbatch(NamedTuple):
    tokens: int
    stage_s: tuple[float, ...]
    chunks: list[PromptChunk]


class Pass:
    """A lane's microbatch in one stage; in the first stage it is formed when its turn comes."""

    __slots__ = ("_group", "_lane", "_microbatch", "_stage")

    def __init__(self, group: Group, lane: Lane, stage: int = 0, microbatch: Microbatch | None = None) -> None:
        self._group, self._lane, self._stage, self._microbatch = group, lane, stage, microbatch

    def begin(self, now: float) -> float | None:
        if not self._group.alive:
            return None
        if self._microbatch is None:
            self._microbatch = self._group.launch(self._lane, now)
        if self._microbatch is None:
            return None
        return self._group.begin_stage(self._stage, self._microbatch, now)

    def end(self, now: float) -> None:
        group, microbatch = self._group, self._microbatch
        assert microbatch is not None
        if not group.alive:
            return
        after = self._stage + 1
        if after == len(group.instances):
            group.complete(self._lane, microbatch, now)
            return
        here, there = group.instances[self._stage], group.instances[after]
        follow = Pass(group, self._lane, after, microbatch)
        message_bytes = microbatch.tokens * group.settings.sizes.hidden_bytes
        here.link_to(there).send(message_bytes, ACTIVATION, None, lambda _: there.request(follow))
