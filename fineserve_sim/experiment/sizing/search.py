"""The search along one axis, system by system."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fineserve_sim.experiment.file.plan import default_axes
from fineserve_sim.experiment.sizing.bisection import easiest_turn, first_integer
from fineserve_sim.experiment.sizing.probe import Attained, Prober, SizingError

STEP, LIMIT = 2.0, 64.0
"""A bracket is looked for in doublings, up to 64 times the start or a 64th of it."""


@dataclass(frozen=True, slots=True)
class Axis:
    """What is searched along: its key in experiments, its name, and which end is the better answer."""

    key: str
    title: str
    best: Literal["fewest", "highest", "tightest"]


AXES = {
    "gpus": Axis("cluster.count", "GPUs", "fewest"),
    "rate": Axis("rate_scale", "Rate scale", "highest"),
    "slo_scale": Axis("slo_scale", "SLO scale", "tightest"),
}


def axis_of(name: str) -> Axis:
    """The axis of ``--over``. Raises SizingError for another name."""
    if name not in AXES:
        raise SizingError(f"--over {name}: expected one of {', '.join(AXES)}")
    return AXES[name]


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found for one system: the probe at the answer (None: nowhere in reach), and all probes in order."""

    system: str
    title: str
    best: Attained | None
    probes: tuple[Attained, ...]


def size(prober: Prober, axis: Axis, *, most_gpus: int | None = None, precision: float = 0.05) -> Iterator[Answer]:
    """One answer a system of the file. GPUs are searched from 1 to ``most_gpus`` (by default twice the file's count), scales
    from the file's own value.

    Raises ConfigError and SizingError as ``Prober.file`` does.
    """
    file = prober.file()
    start = {**default_axes(file.file), **(prober.at or {})}
    for item in file.file.systems:
        system = item if isinstance(item, str) else item.name
        asked: dict[float, Attained] = {}

        def holds(value: float, system: str = system, asked: dict[float, Attained] = asked) -> bool:
            if value not in asked:
                asked[value] = prober.ask(system, axis.key, value)
            return asked[value].holds

        if axis.key == "cluster.count":
            found: float | None = first_integer(1, most_gpus or 2 * file.file.cluster.count, holds)
        else:
            easier = 1 / STEP if axis.best == "highest" else STEP
            found = easiest_turn(float(start[axis.key]), easier, LIMIT, precision, holds)
        title = file.setup.systems[system].title
        yield Answer(system, title, None if found is None else asked[found], tuple(asked.values()))
