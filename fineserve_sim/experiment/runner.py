"""Run an experiment: reference runs, then the SLOs that follow from them, then all cells, then the results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fineserve_sim.cluster import simulate as simulate_cluster
from fineserve_sim.experiment.errors import ConfigError, Interrupted
from fineserve_sim.experiment.files import prepare, unwritable
from fineserve_sim.experiment.metrics import RunData
from fineserve_sim.experiment.plan import Experiment, Point, build
from fineserve_sim.experiment.pool import Simulate, Task, Workers, keyed
from fineserve_sim.experiment.results import Outcome, write_results
from fineserve_sim.experiment.runs import Run
from fineserve_sim.experiment.slo import BaseSlo, base_slos, reference_runs, tpot_slos
from fineserve_sim.experiment.store import Store
from fineserve_sim.experiment.validation import validate
from fineserve_sim.experiment.yaml_file import Document, parse_value, read_yaml

OnProgress = Callable[[int, int, str], None]
"""Called with simulations done, simulations in all, and the one just done."""


def load_experiment(
    path: Path, overrides: Sequence[tuple[str, str]] = (), quick: bool = False, seeds: int | None = None
) -> Experiment:
    """The validated experiment of a file. ``overrides`` are dotted keys with YAML values, as ``--set`` takes them, and
    win over ``quick``. Raises ConfigError for every mistake, at the line or option that made it."""
    document = read_yaml(path)
    shortened = _quick(document)
    for key, text in overrides:
        place = f"--set {key}={text}"
        if key.partition(".")[0] == "quick":
            raise ConfigError(place, key, "set the key itself instead of its quick value")
        for each in (document, shortened):
            each.set(key, parse_value(text, place), place)
    if seeds is not None:
        document.set("seeds", seeds, f"--seeds {seeds}")
        shortened.set("seeds", seeds, f"--seeds {seeds}")
    validate(shortened)  # a mistake under quick shows before somebody needs it
    return build(shortened if quick else document, path.stem, path.resolve().parent)


def _quick(document: Document) -> Document:
    """The document with the values under ``quick`` in place."""
    shortened = Document(copy.deepcopy(document.data), dict(document.places))
    wanted = document.data.get("quick", {})
    if not isinstance(wanted, dict):
        raise document.error(("quick",), "must be a mapping of dotted keys, such as workload.requests: 300")
    for key, value in wanted.items():
        shortened.set(key, value, document.place(("quick", key)))
    return shortened


def run_experiment(
    path: Path,
    out: Path,
    *,
    seeds: int | None = None,
    jobs: int | None = None,
    overrides: Sequence[tuple[str, str]] = (),
    quick: bool = False,
    decisions: bool = False,
    on_progress: OnProgress | None = None,
    simulate: Simulate = simulate_cluster,
) -> Path:
    """Run the experiment of a file and return the path of its summary.json. See ``run_loaded``."""
    experiment = load_experiment(path, overrides, quick, seeds)
    return run_loaded(experiment, out, jobs=jobs, decisions=decisions, on_progress=on_progress, simulate=simulate)


def run_loaded(
    experiment: Experiment,
    out: Path,
    *,
    jobs: int | None = None,
    decisions: bool = False,
    on_progress: OnProgress | None = None,
    simulate: Simulate = simulate_cluster,
) -> Path:
    """Simulate what ``out`` does not hold yet, write all results there and return the path of summary.json.

    ``jobs`` processes (default: one a core) give the same bytes as one. Raises ConfigError (unusable output folder
    included), ScenarioError for a cell that cannot run, Interrupted after Ctrl-C; finished simulations are kept then.
    """
    prepare(out)
    progress = _Progress(len(reference_runs(experiment)) + len(experiment.points) * experiment.file.seeds, on_progress)
    with _disk_errors(out), Workers(jobs) as workers:
        try:
            session = _Session(Store(out), out, workers, decisions, simulate, progress)
            outcomes = session.simulate_all(experiment)
            return write_results(experiment, outcomes, Store(out), out)
        except KeyboardInterrupt:
            raise Interrupted(progress.done, progress.total) from None


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise unwritable(out, problem) from None


class _Progress:
    """Counts simulations done and tells the caller."""

    def __init__(self, total: int, tell: OnProgress | None) -> None:
        self.done = 0
        self.total = total
        self._tell = tell

    def count(self, run: Run) -> None:
        self.done += 1
        if self._tell is not None:
            self._tell(self.done, self.total, str(run))


@dataclass(frozen=True, slots=True)
class _Session:
    """One call of ``run_loaded``."""

    store: Store
    out: Path
    workers: Workers
    decisions: bool
    simulate: Simulate
    progress: _Progress

    def simulate_all(self, experiment: Experiment) -> list[Outcome]:
        """Reference runs first, then every cell under the SLOs that they give; the outcome of each point."""
        references = reference_runs(experiment)
        key_of_reference = dict(zip(references, self._ensure(references, decisions=False), strict=True))
        stored = lru_cache(maxsize=32)(self.store.read)

        def read(run: Run) -> RunData:
            return stored(key_of_reference[run])

        points = experiment.points
        slos = [base_slos(experiment, point, read) for point in points]
        tpots = [tpot_slos(experiment, point, read) for point in points]
        cells = [_cells(experiment, point, slo) for point, slo in zip(points, slos, strict=True)]
        keys = iter(self._ensure([run for runs in cells for run in runs], self.decisions))
        return [
            Outcome(point, slo, tpot, tuple(next(keys) for _ in runs))
            for point, slo, tpot, runs in zip(points, slos, tpots, cells, strict=True)
        ]

    def _ensure(self, runs: Sequence[Run], decisions: bool) -> list[str]:
        """Simulate the runs that are not stored yet, equal ones once. Returns the key of each, in order."""
        keys = [keyed(run) for run in runs]
        missing: dict[str, list[Run]] = {}
        for run, key in zip(runs, keys, strict=True):
            if self.store.has(key, decisions):
                self.progress.count(run)
            else:
                missing.setdefault(key, []).append(run)
        tasks = [Task(group[0], key, self.out, decisions, self.simulate) for key, group in missing.items()]
        for task in self.workers.run(tasks):
            for run in missing[task.key]:
                self.progress.count(run)
        return keys


def _cells(experiment: Experiment, point: Point, slos: Mapping[str, BaseSlo]) -> list[Run]:
    setup = experiment.setup_of(point)
    limits = tuple(slos[model.id].at(point.slo_scale) for model in setup.models)
    where = (setup, point.overrides, point.system, point.load, point.rate_scale)
    return [Run(*where, seed, limits) for seed in range(experiment.file.seeds)]
