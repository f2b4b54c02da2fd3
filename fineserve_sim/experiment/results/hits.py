"""Which requests met a limit, as intervals need it: counts in batches of consecutive requests (``stats.of_share``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from fineserve_traces import Requests
from numpy.typing import NDArray

from fineserve_sim.experiment.results.stats import BATCHES
from fineserve_sim.experiment.run.run_data import Ints, Mask


@dataclass(frozen=True, slots=True, eq=False)
class Hits:
    """How many measured requests of a run, or of a model, ``met`` the limit, ``of`` how many: in batches in the order of
    arrival, (batches,) each."""

    met: Ints
    of: Ints

    @classmethod
    def among(cls, hit: Mask) -> Hits:
        """From a mask, (n,) in arrival order."""
        ends = np.cumsum(sizes(len(hit)))
        upto = np.concatenate([[0], np.cumsum(hit)])[ends]
        return cls(np.diff(upto, prepend=0), sizes(len(hit)))

    def __len__(self) -> int:
        return int(self.of.sum())

    def sum(self) -> int:
        return int(self.met.sum())


def sizes(requests: int) -> Ints:
    """How many requests each batch has: as equal as possible, the first ones larger by one; no batch without any."""
    batches = min(BATCHES, requests)
    if not batches:
        return np.zeros(0, dtype=np.int64)
    each, more = divmod(requests, batches)
    return np.array([each + 1] * more + [each] * (batches - more), dtype=np.int64)


class Batches:
    """Where the batches of each model begin, and the batches of all together (the last row), by the number of a request. Found
    by reading the requests twice. ``models`` may name more than have requests. ``window_s``: from the first measured arrival
    to the last one."""

    def __init__(self, requests: Requests, warmup: int, models: Sequence[str] = ()) -> None:
        self.models = (*requests.models, *(name for name in models if name not in requests.models))
        self.warmup = warmup
        counts, self.window_s = _measured(requests, warmup, len(self.models))
        self.sizes = [sizes(count) for count in (*counts.tolist(), int(counts.sum()))]
        self._starts = np.full((len(self.sizes), BATCHES), np.iinfo(np.int64).max)
        ranks = [np.cumsum(each) - each for each in self.sizes]
        self._starts[-1, : len(ranks[-1])] = ranks[-1] + warmup
        seen, before = 0, np.zeros(len(self.models), dtype=np.int64)
        for chunk in requests.chunks():
            number = np.arange(seen, seen + len(chunk))
            seen += len(chunk)
            measured = number >= warmup
            for model, own in _by_model(chunk.model[measured], number[measured]):
                rank = ranks[model] - before[model]
                here = (rank >= 0) & (rank < len(own))
                self._starts[model, np.flatnonzero(here)] = own[rank[here]]
                before[model] += len(own)

    def of(self, model: Ints, number: Ints) -> Ints:
        """The batch of each measured request, (n,), among its model's batches; the number of models stands for all of them."""
        found: Ints = (self._starts[model] <= number[:, None]).sum(axis=1) - 1
        return found


def _measured(requests: Requests, warmup: int, models: int) -> tuple[Ints, tuple[float, float]]:
    counts, seen, start_s, end_s = np.zeros(models, dtype=np.int64), 0, 0.0, 0.0
    for chunk in requests.chunks():
        skipped = min(max(0, warmup - seen), len(chunk))
        counts += np.bincount(chunk.model[skipped:], minlength=len(counts))
        if seen <= warmup < seen + len(chunk):
            start_s = float(chunk.arrival_s[warmup - seen])
        seen, end_s = seen + len(chunk), float(chunk.arrival_s[-1])
    return counts, (start_s, end_s)


def _by_model(model: NDArray[np.int32], number: Ints) -> Iterator[tuple[int, Ints]]:
    """The numbers of the requests of each model, in their order."""
    order = np.argsort(model, kind="stable")
    found, firsts = np.unique(model[order], return_index=True)
    ends = [*firsts[1:].tolist(), len(order)]
    for each, first, end in zip(found.tolist(), firsts.tolist(), ends[: len(firsts)], strict=True):
        yield each, number[order[first:end]]
