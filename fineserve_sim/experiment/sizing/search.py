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


GPUS = Axis("cluster.count", "GPUs", "fewest")
RATE = Axis("rate_scale", "Rate scale", "highest")
AXES = {"gpus": GPUS, "rate": RATE, "slo_scale": Axis("slo_scale", "SLO scale", "tightest")}


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

    @property
    def why(self) -> str:
        """Why there is no answer: what the probe came to that came closest."""
        if self.best is not None or not self.probes:
            return ""
        closest = max(self.probes, key=lambda probe: min(probe.shares.values(), default=-1.0))
        return f"at {closest.value:g}: {closest.why}"


def fewest_gpus(prober: Prober, system: str, title: str, least: int, most: int) -> Answer:
    """The fewest GPUs from ``least`` to ``most``, with all seeds run at the answer."""
    asked = Asked(prober, system, GPUS)
    return asked.answer(title, first_integer(least, most, asked.holds))


def turning_point(prober: Prober, system: str, title: str, axis: Axis, start: float, precision: float) -> Answer:
    """The highest rate or the tightest SLO, to within a factor of 1 + ``precision``, with all seeds run at the answer."""
    asked = Asked(prober, system, axis)
    easier = 1 / STEP if axis.best == "highest" else STEP
    return asked.answer(title, easiest_turn(start, easier, LIMIT, precision, asked.holds))


class Asked:
    """The questions of one search, each asked once."""

    def __init__(self, prober: Prober, system: str, axis: Axis) -> None:
        self._prober, self._system, self._axis = prober, system, axis
        self._found: dict[float, Attained] = {}

    def holds(self, value: float) -> bool:
        if value not in self._found:
            self._found[value] = self._prober.ask(self._system, self._axis.key, value)
        return self._found[value].holds

    def answer(self, title: str, value: float | None) -> Answer:
        """The probe at ``value``, over all seeds, so that its interval is as narrow as the seeds allow."""
        if value is not None and self._found[value].early:
            self._found[value] = self._prober.ask(self._system, self._axis.key, value, fully=True)
        return Answer(self._system, title, None if value is None else self._found[value], tuple(self._found.values()))


def size(prober: Prober, axis: Axis, *, most_gpus: int | None = None, precision: float = 0.05) -> Iterator[Answer]:
    """One answer a system of the file. GPUs are searched from 1 to ``most_gpus`` (by default twice the file's count), scales
    from the file's own value.

    Raises ConfigError and SizingError as ``Prober.file`` does.
    """
    file = prober.file()
    start = {**default_axes(file.file), **(prober.at or {})}
    for item in file.file.systems:
        system = item if isinstance(item, str) else item.name
        title = file.setup.systems[system].title
        if axis is GPUS:
            yield fewest_gpus(prober, system, title, 1, most_gpus or 2 * file.file.cluster.count)
        else:
            yield turning_point(prober, system, title, axis, float(start[axis.key]), precision)
