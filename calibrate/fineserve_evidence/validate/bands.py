"""How far measurements lie from predictions, by the class of what is predicted; and whether bands hold on sets not learnt from.

An observation is the ratio measured / predicted of one row. A class is what may be known of a prediction before anything is
measured: the step times (the GPU's own tables, or another's scaled), the moment, the engine, whether engines share a GPU,
whether requests wait, and whether the model is a mixture of experts. Its band goes from the 5th to the 95th percentile of the
ratios, in which every set weighs the same. A class of fewer than three sets has no band: the next wider class speaks for it.

Leaving out one set at a time tells how bands do on what they were not learnt from: the share of rows inside, and their widths.
Only sets that nothing was fitted on are learnt from and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

import numpy as np

from fineserve_evidence.validate.cases import Case, Floats, Label, OpenLoop
from fineserve_evidence.validate.errors import label_of
from fineserve_evidence.validate.predict import Predicted, StepsOf
from fineserve_sim.catalog.model_errors import ANY, ErrorClass, Predictable, wider
from fineserve_sim.experiment.run.alone import first_token_s

LEVEL = 0.9
"""What a band is to hold: the middle of the 80 to 95 % that it may come to on sets left out, chosen before any was counted."""

LEAST_SETS = 3
WAITS = 2.0
"""Requests wait where the predicted TTFT is more than so many times that of the prompt alone: load above saturation."""

FITTED = ("fineserve_authors", "aegaeon", "distserve")
CHOSEN = "reading chosen on these rows"
"""Sets by the start or the end of their names, on whose rows something was fitted or chosen (docs/fidelity.md)."""

APART = "prefill and decode apart"
"""The end of the names of sets of engines with one role, whose TTFT is another queue: too few for a class, and of no other."""

IMPOSSIBLE = "Llama-3.1-8B-Instruct-FP8"
"""The model of sets whose measured prefill is faster than tensor cores can be (docs/fidelity.md, H200): counted, not learnt."""


class Observation(NamedTuple):
    """measured / predicted of one row (infinity or 0 where nothing was predicted), and the set that it belongs to."""

    label: Label
    of: Predictable
    ratio: float

    @property
    def fitted(self) -> bool:
        """Whether something was fitted on its set."""
        return self.label.set.startswith(FITTED) or CHOSEN in self.label.set

    @property
    def counts(self) -> bool:
        """Whether its set is of a class, and nothing was fitted on it."""
        return not self.fitted and not self.label.set.endswith(APART)


def observations(
    predictions: Iterable[Predicted], steps: StepsOf, tables: Literal["measured", "scaled"]
) -> Iterator[Observation]:
    """The rows of predicted sets. A run of single requests is one row, its means: what is asked of a simulation are many."""
    for predicted in predictions:
        case = predicted.case
        alone_s = _alone_s(case, steps)
        pairs = {"ttft": (case.ttft_s, predicted.ttft_s), "tpot": (case.tpot_s, predicted.tpot_s)}
        if isinstance(case.load, OpenLoop) and case.load.each:
            pairs = {moment: _means(*pair) for moment, pair in pairs.items()}
        waits = ~(pairs["ttft"][1] <= WAITS * alone_s)
        engine = "vllm" if case.label.backend == "vllm" else "other"
        sharing = "shared" if isinstance(case.load, OpenLoop) and case.load.models > 1 else "alone"
        layers = "dense" if case.serving.model.experts is None else "experts"
        for moment, (measured, guess) in pairs.items():
            for row, value in enumerate(measured):
                if np.isfinite(value) and value > 0:
                    of = Predictable(moment, tables, engine, sharing, "above" if waits[row] else "below", layers)
                    ratio = value / guess[row] if np.isfinite(guess[row]) and guess[row] > 0 else 0.0
                    yield Observation(label_of(case, row), of, float(ratio))


def _means(measured: Floats, guess: Floats) -> tuple[Floats, Floats]:
    both = np.isfinite(measured) & np.isfinite(guess)
    return measured[both].mean(keepdims=True), guess[both].mean(keepdims=True)


def _alone_s(case: Case, steps: StepsOf) -> float:
    """Predicted seconds to the first token of a mean prompt on the idle engine."""
    own = case.serving
    step = steps(own)
    prompt = int(np.mean(case.load.prompt_tokens))
    return first_token_s(step, prompt, own.token_budget) + float(own.api.seconds(prompt))


def learn(rows: Sequence[Observation]) -> list[ErrorClass]:
    """The bands of all classes of enough sets."""
    learnt = [row for row in rows if row.counts and IMPOSSIBLE not in row.label.model]
    members: dict[Predictable, list[Observation]] = {}
    for row in learnt:
        for each in wider(row.of):
            members.setdefault(each, []).append(row)
    found = (_class(of, own) for of, own in sorted(members.items()))
    return [each for each in found if each.sets >= LEAST_SETS]


def _class(of: Predictable, rows: Sequence[Observation]) -> ErrorClass:
    times = Counter(row.label for row in rows)
    ratios = np.array([row.ratio for row in rows])
    weights = np.array([1 / times[row.label] for row in rows])
    order = np.argsort(ratios, kind="stable")  # the same on every processor
    ratios, weights = ratios[order], weights[order]
    places = (np.cumsum(weights) - weights / 2) / weights.sum()
    low, high = np.interp([(1 - LEVEL) / 2, (1 + LEVEL) / 2], places, ratios)
    median = float(np.median(errors_of(ratios)))
    return ErrorClass(
        of=of, sets=len(times), rows=len(rows), median=round(median, 4), low=round(low, 4), high=round(high, 4)
    )


def errors_of(ratios: Floats) -> Floats:
    """Absolute errors, predicted / measured - 1; infinite where nothing was predicted."""
    with np.errstate(divide="ignore"):
        return np.abs(1 / ratios - 1)


def band_of(of: Predictable, classes: Iterable[ErrorClass]) -> ErrorClass | None:
    """The nearest class that has a band."""
    known = {each.of: each for each in classes}
    return next((known[each] for each in wider(of) if each in known), None)


class Inside(NamedTuple):
    """A row that was left out: its error, whether its class's band holds it, and the half-width of that.

    Both are of predicted / measured: an error of 0.5 is a prediction of half or one and a half times what was measured.
    """

    row: Observation
    error: float
    inside: bool
    half_width: float


def left_out(rows: Sequence[Observation]) -> list[Inside]:
    """Every row of sets that nothing was fitted on, beside the band that all other sets give it."""
    counted = [row for row in rows if row.counts]
    found = []
    for label in dict.fromkeys(row.label for row in counted):
        classes = learn([row for row in counted if row.label != label])
        for row in counted:
            if row.label == label and (band := band_of(row.of, classes)) is not None:
                error = float(errors_of(np.array([row.ratio]))[0])
                found.append(Inside(row, error, band.low <= row.ratio <= band.high, _half_width(band)))
    return found


def _half_width(band: ErrorClass) -> float:
    return (1 / band.low - 1 / band.high) / 2 if band.low > 0 else np.inf


@dataclass(frozen=True, slots=True)
class Coverage:
    """What bands do for one kind of step times, layers and moment (``any``: all): rows, sets, the share inside, the median
    half-width and the median error."""

    tables: str
    layers: str
    moment: str
    rows: int
    sets: int
    inside: float
    half_width: float
    error: float


def coverage(found: Sequence[Inside]) -> list[Coverage]:
    """A line a kind of step times, layers and moment that has rows, and lines for all layers and both moments."""
    kinds = product(("measured", "scaled"), ("dense", "experts", ANY), ("ttft", "tpot", ANY))
    return [line for kind in kinds if (line := _covered(found, *kind)) is not None]


def _covered(found: Sequence[Inside], tables: str, layers: str, moment: str) -> Coverage | None:
    asked = {"tables": tables, "layers": layers, "moment": moment}
    mine = [
        each for each in found if all(getattr(each.row.of, name) == one or one == ANY for name, one in asked.items())
    ]
    if not mine:
        return None
    half_width, error = (float(np.median([getattr(each, name) for each in mine])) for name in ("half_width", "error"))
    inside = float(np.mean([each.inside for each in mine]))
    sets = len({each.row.label for each in mine})
    return Coverage(tables, layers, moment, len(mine), sets, inside, half_width, error)
