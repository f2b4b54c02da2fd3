"""A recorded trace as the requests of a run: for the models of the file, on the clock of its load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from fineserve_traces import Requests, Trace

from fineserve_sim.experiment.run.streams import stream


@dataclass(frozen=True, slots=True)
class Replay:
    """The first ``requests`` of what was ``recorded``, from ``first_s`` on, on a clock that runs ``faster``; a ``Requests``.

    ``place`` says which of ``models`` each recorded model is; where there are ``shares`` of the models, requests are dealt by
    these instead, with the random numbers of ``seed``.
    """

    recorded: Requests
    requests: int
    first_s: float
    faster: float
    models: tuple[str, ...]
    place: tuple[int, ...]
    shares: tuple[float, ...] | None
    seed: int

    @property
    def source(self) -> str:
        return self.recorded.source

    def chunks(self) -> Iterator[Trace]:
        left, rng = self.requests, stream(self.seed, "assign")
        shares, place = np.array(self.shares or ()), np.array(self.place, dtype=np.int32)
        number = np.arange(len(shares), dtype=np.int32)
        for recorded in self.recorded.chunks():
            chunk = recorded.head(left) if left < len(recorded) else recorded
            dealt = rng.choice(number, size=len(chunk), p=shares / shares.sum()) if len(shares) else None
            left -= len(chunk)
            yield replace(
                chunk,
                arrival_s=(chunk.arrival_s - self.first_s) / self.faster,
                model=place[chunk.model] if dealt is None else dealt,
                models=self.models,
            )
            if not left:
                return
