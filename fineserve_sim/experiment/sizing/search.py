"""The search along one axis, system by system."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from fineserve_sim.experiment.file.metric_names import EACH
from fineserve_sim.experiment.file.plan import Experiment, default_axes
from fineserve_sim.experiment.file.resolve import Setup
from fineserve_sim.experiment.file.schema import MixedCluster
from fineserve_sim.experiment.results.places import Places
from fineserve_sim.experiment.run.rates import base_rates
from fineserve_sim.experiment.sizing.bisection import easiest_turn, first_integer
from fineserve_sim.experiment.sizing.feasibility import Change, Feasibility
from fineserve_sim.experiment.sizing.gpu_band import GpuBand
from fineserve_sim.experiment.sizing.probe import Attained, Prober, SizingError
from fineserve_sim.systems.spec import ClairvoyantSpec

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
    """What was found for one system on one type of GPU: the probe at the answer (None: nowhere in reach), and all probes in
    order. ``tp`` None: that of the file. ``bound``: what was out of reach before any probe. ``changes``: of models, where none
    holds as asked. ``band``: of the number of GPUs, with the model's own error."""

    system: str
    title: str
    best: Attained | None
    probes: tuple[Attained, ...]
    gpu: str = ""
    tp: int | None = None
    bound: Feasibility | None = None
    changes: tuple[Change, ...] = ()
    band: GpuBand | None = None

    @property
    def closest(self) -> Attained | None:
        """The probe that came closest; of equal ones that with the lowest value."""
        ranked = sorted(self.probes, key=lambda probe: probe.value)
        return max(ranked, key=lambda probe: min(probe.shares.values(), default=-1.0), default=None)

    @property
    def why(self) -> str:
        """Why there is no answer: what is within reach at most, or what the probe came to that came closest."""
        closest = self.closest
        if self.bound is not None:
            shares = ", ".join(f"{100 * share:.1f} %" for share in self.bound.bounds.values())
            return f"{shares} at most are within reach, each model alone on idle GPUs"
        if self.best is not None or closest is None:
            return ""
        alike = [probe.value for probe in self.probes if probe is not closest and probe.like(closest)]
        same = f"; the same at {max(alike):g}" if alike else ""
        return closest.problem or f"at {closest.value:g}: {closest.why}{same}"


def fewest_gpus(prober: Prober, system: str, title: str, least: int, most: int) -> Answer:
    """The fewest GPUs from ``least`` to ``most``, with all seeds run at the answer."""
    asked = Asked(prober, system, GPUS)
    return asked.answer(title, partial(first_integer, least, most, asked.holds, asked.alike))


def turning_point(prober: Prober, system: str, title: str, axis: Axis, start: float, precision: float) -> Answer:
    """The highest rate or the tightest SLO, to within a factor of 1 + ``precision``, with all seeds run at the answer."""
    asked = Asked(prober, system, axis)
    easier = 1 / STEP if axis.best == "highest" else STEP
    return asked.answer(title, partial(easiest_turn, start, easier, LIMIT, precision, asked.holds))


class Asked:
    """The questions of one search, each asked once."""

    def __init__(self, prober: Prober, system: str, axis: Axis) -> None:
        self._prober, self._system, self._axis = prober, system, axis
        self._found: dict[float, Attained] = {}

    def holds(self, value: float) -> bool:
        if value not in self._found:
            self._found[value] = self._prober.ask(self._system, self._axis.key, value)
        return self._found[value].holds

    def alike(self, value: float, other: float) -> bool:
        """Whether two values that were asked came to the very same."""
        return self._found[value].like(self._found[other])

    def answer(self, title: str, search: Callable[[], float | None]) -> Answer:
        """The probe at the value that ``search`` finds, over all seeds, so that its interval is as narrow as the seeds allow.
        Where it does not hold over all of them (a seed cannot run), search on: what was asked is known."""
        while (value := search()) is not None and self._found[value].early:
            self._found[value] = self._prober.ask(self._system, self._axis.key, value, fully=True)
        return Answer(self._system, title, None if value is None else self._found[value], tuple(self._found.values()))


def size(
    prober: Prober, axis: Axis, *, most_gpus: int | None = None, precision: float = 0.05, only: str = ""
) -> Iterator[Answer]:
    """One answer a system of the file, or of the ``only`` one. GPUs are searched up to ``most_gpus`` (by default twice the
    file's count) from as many as the models' weights need, scales from the file's own value. Nothing is searched where the
    targets are out of reach on idle GPUs.

    Raises ConfigError and SizingError as ``Prober.file`` does, SizingError where ``at`` fixes the axis.
    """
    file = prober.file()
    if axis is GPUS and isinstance(file.file.cluster, MixedCluster):
        raise SizingError(
            "cluster.nodes: size finds a number of GPUs of one kind; give --gpu for each kind, or search --over rate or "
            "slo_scale"
        )
    if axis.key in (prober.at or {}):
        raise SizingError(f"--at {axis.key}: it is what is searched; leave it out")
    of_each = any(goal.metric.startswith(EACH) for goal in prober.goals)
    slack = 0.0 if of_each else 1 - min(goal.share for goal in prober.goals)
    most = most_of(prober, most_gpus)
    start = start_of(prober, axis)
    easiest = {"fewest": most, "highest": start, "tightest": start * LIMIT}[axis.best]
    for system in [only] if only else runnable(file):
        title = file.setup.systems[system].title
        bound = prober.bound(system, axis.key, easiest)
        if bound is not None and bound.hopeless:
            found = Answer(system, title, None, (), bound=bound)
        elif axis is GPUS:
            found = fewest_gpus(prober, system, title, min(most, least_gpus(file.setup, system, slack)), most)
        else:
            found = turning_point(prober, system, title, axis, start, precision)
        yield replace(found, gpu=file.setup.gpu_name)


def most_of(prober: Prober, most_gpus: int | None) -> int:
    """GPUs that are tried at most."""
    return most_gpus or 2 * prober.file().file.cluster.count


def start_of(prober: Prober, axis: Axis) -> float:
    """The file's own value of the axis, or that of the place."""
    file = prober.file()
    places = {"cluster.count": file.file.cluster.count, **default_axes(file.file), **(prober.at or {})}
    return float(places[axis.key])


def runnable(experiment: Experiment) -> list[str]:
    """The systems of the file without bounds, which cannot run. Raises SizingError where there are bounds alone."""
    names = [item if isinstance(item, str) else item.name for item in experiment.file.systems]
    systems = experiment.setup.systems
    found = [name for name in names if not isinstance(systems[name].scheduler, ClairvoyantSpec)]
    if not found:
        raise SizingError(f"{', '.join(names)}: a bound that nobody can run; name a system, such as fineserve")
    return found


def least_gpus(setup: Setup, system: str, slack: float) -> int:
    """GPUs below which the weights of the models cannot all be resident; 1 where models come and go. Models whose requests are
    few enough to be missed (half as many again as ``slack`` of all) need not be."""
    if setup.systems[system].residency is not None:
        return 1
    load = next(iter(setup.loads), None)
    rates = base_rates(setup, load)
    needed = [name for name, rate in rates.items() if rate > 1.5 * slack * sum(rates.values())]
    places = Places(setup, {"instances": [], "unplaced": []})
    weights_bytes = sum(
        places.fixed_bytes(name) * places.served[name].tp * places.served[name].ranks for name in needed
    )
    return max(1, -(-weights_bytes // places.usable_bytes[0]))


def to_take(answers: Sequence[Answer], axis: Axis) -> Answer | None:
    """The cheapest answer in GPUs; else the highest rate or the tightest SLO, the cheapest of equal ones."""
    if axis is GPUS:
        return cheapest(answers)
    values = [answer.best.value for answer in answers if answer.best is not None]
    best = max(values, default=None) if axis.best == "highest" else min(values, default=None)
    return cheapest([answer for answer in answers if answer.best is not None and answer.best.value == best])


def cheapest(answers: Sequence[Answer]) -> Answer | None:
    """The answer with the fewest dollars an hour, or GPUs where a price is missing; of equal ones the one that attains most."""
    found = [answer for answer in answers if answer.best is not None]
    priced = all(answer.best is not None and answer.best.usd_per_hour is not None for answer in found)

    def cost(answer: Answer) -> tuple[float, float]:
        best = answer.best
        assert best is not None
        return (best.usd_per_hour or 0.0) if priced else best.value, -min(best.shares.values(), default=0.0)

    return min(found, key=cost, default=None)
