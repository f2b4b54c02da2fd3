"""Claims that an experiment file states itself (``claims:``): ``FS-10c/prism*`` and ``FS-10c/static*`` are parts of FS-10c."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from fineserve_sim.experiment.file.plan import Experiment
from fineserve_sim.experiment.reproduce.finished import Results
from fineserve_sim.experiment.reproduce.judge import Evaluation, Quantity
from fineserve_sim.experiment.reproduce.registry import Decider


def _claim_of(part: str) -> str:
    """The claim that a part belongs to."""
    return part.partition("/")[0]


def deciders(experiments: Iterable[Experiment]) -> dict[str, Decider]:
    """What decides each claim that experiment files state: the files that do, in order."""
    found: dict[str, list[str]] = {}
    for experiment in experiments:
        for claim in dict.fromkeys(_claim_of(claim.id) for claim in experiment.file.claims):
            found.setdefault(claim, []).append(experiment.name)
    return {
        claim: Decider(partial(_evaluate, claim, names), tuple(names), ", ".join(names))
        for claim, names in found.items()
    }


def _evaluate(claim: str, names: Iterable[str], results: Results) -> Evaluation:
    """Every part of a claim, as summary.json has it. Raises MissingError where an experiment did not run."""
    entries = [entry for name in names for entry in results.summary(name)["claims"] if _claim_of(entry["id"]) == claim]
    notes = dict.fromkeys(str(entry["note"]) for entry in entries if entry["note"])
    return Evaluation(tuple(_quantity(entry) for entry in entries), " ".join(notes))


def _quantity(entry: Mapping[str, Any]) -> Quantity:
    ours = entry["ours"]
    if isinstance(ours, list):
        ours = " ".join(map(str, ours))
    half_width = math.nan if entry["half_width"] is None else entry["half_width"]
    label = str(entry["id"]).partition("/")[2]
    return Quantity(math.nan if ours is None else ours, half_width, label, entry["verdict"])
