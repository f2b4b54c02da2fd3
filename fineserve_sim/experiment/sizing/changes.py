"""Where nothing holds: the cluster that comes closest, and other precisions and degrees of its worst model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fineserve_sim.experiment.file.errors import ConfigError
from fineserve_sim.experiment.sizing.feasibility import Change, Slow
from fineserve_sim.experiment.sizing.probe import Prober
from fineserve_sim.experiment.sizing.search import GPUS, Answer, Axis, most_of, size, start_of

Found = Sequence[tuple[Answer, Prober]]
"""Answers, each with the prober that found it."""


def closest(found: Found) -> tuple[Answer, Prober] | None:
    """The answer with the probe that came closest to its targets; the first one that is out of reach where none was asked;
    None where no cluster could be built."""
    ran = [(answer, prober) for answer, prober in found if answer.closest is not None and answer.closest.shares]
    if ran:
        return max(ran, key=lambda each: _margin(*each))
    return next(((answer, prober) for answer, prober in found if answer.bound is not None), None)


def _margin(answer: Answer, prober: Prober) -> float:
    probe = answer.closest
    assert probe is not None
    return min(probe.shares[metric] - share for metric, share in prober.targets.items())


def size_changed(
    found: Found, axis: Axis, *, most_gpus: int | None, precision: float
) -> Iterator[tuple[Answer, Prober]]:
    """Where no answer holds, the same search with other precisions and degrees of the models that are out of reach. Where none
    is, of the model with the most misses at the closest cluster."""
    nearest = closest(found)
    if nearest is None or any(answer.best for answer, _ in found):
        return
    for answer, prober in [each for each in found if each[0].bound is not None] or [nearest]:
        for changes in remedies(answer, prober, axis):
            most = most_of(prober, most_gpus)
            changed = prober.changed(changes, most if axis is GPUS else None)
            try:
                searched = list(size(changed, axis, most_gpus=most, precision=precision, only=answer.system))
            except ConfigError:
                continue  # a model that fits on no GPU that way
            yield from ((replace(each, tp=answer.tp, changes=changes), changed) for each in searched)


def remedies(answer: Answer, prober: Prober, axis: Axis) -> list[tuple[Change, ...]]:
    """Changes of models with which the targets may be kept."""
    if answer.bound is not None:
        return answer.bound.remedies
    probe = answer.closest
    if probe is None or not probe.missed_by or not probe.misses:
        return []
    worst = max(probe.missed_by, key=probe.missed_by.__getitem__)
    decodes = 2 * (probe.misses["slow"] + probe.misses["overdue"]) > sum(probe.misses.values())
    slow = Slow(worst, "decode_s" if decodes else "prefill_s")
    bound = prober.bound(answer.system, axis.key, probe.value, slow)
    return [] if bound is None else bound.remedies


def place_of(answer: Answer, prober: Prober, axis: Axis) -> float:
    """The value at which an answer comes closest: that of its best probe, or the file's own where none was asked."""
    return start_of(prober, axis) if answer.closest is None else answer.closest.value
