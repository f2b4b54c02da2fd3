"""Losses of islands in a file, so that a search that was stopped goes on.

A search that is run again asks for the same islands in the same order, each as far as the same limit. It gets them from the
file as long as there are some, and so comes to the same answer as one that was never stopped. Results of another problem, or
of other sources of ours, stay in the file and count for nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fineserve_sim.experiment.run.store import key_of, plain
from fineserve_sim.planning.islands import Asked, Island, Losses
from fineserve_sim.planning.problem import Member, Problem


class Store:
    """The file and the problem. Lines are added as islands are simulated; a line that was cut off counts for nothing."""

    def __init__(self, path: Path, problem: Problem) -> None:
        self._path, self._digest = path, digest_of(problem)
        self._known: dict[Asked, Losses] = dict(self._read())

    def __len__(self) -> int:
        return len(self._known)

    def get(self, asked: Asked) -> Losses | None:
        return self._known.get(asked)

    def add(self, found: Mapping[Asked, Losses]) -> None:
        """Keep these, too."""
        self._known |= found
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            for (island, limit), losses in found.items():
                row = {"of": self._digest, "island": island, "limit": limit}
                row |= {"late": losses.by_member, "fits": losses.fits, "whole": losses.whole}
                file.write(json.dumps(row) + "\n")

    def _read(self) -> list[tuple[Asked, Losses]]:
        if not self._path.exists():
            return []
        rows = filter(None, map(_row, self._path.read_text(encoding="utf-8").splitlines()))
        return [
            ((_island(row["island"]), row["limit"]), Losses(tuple(row["late"]), row["fits"], row["whole"]))
            for row in rows
            if row["of"] == self._digest
        ]


def _row(line: str) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return row


def _island(members: list[list[Any]]) -> Island:
    return tuple(
        Member(model, option, number, tuple(kinds), tuple(gpus)) for model, option, number, kinds, gpus in members
    )


def digest_of(problem: Problem) -> str:
    """All that the losses of islands depend on: not the number of GPUs, and no rule."""
    kinds = (next(gpu for gpu in problem.gpus if gpu.spec == kind) for kind in problem.kinds)
    one = replace(problem.scenario, gpus=tuple(kinds))
    parts = [(key_of(replace(one, trace=part.trace), 0), part.weight) for part in problem.parts]
    options = [[plain(option.precision), option.tp] for options in problem.options for option in options]
    described = json.dumps([parts, options, problem.limits], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:16]
