"""Run an experiment: simulate what its folder lacks, then write all results there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fineserve_sim.cluster import simulate as simulate_cluster
from fineserve_sim.experiment.file.errors import Interrupted
from fineserve_sim.experiment.file.load import load_experiment
from fineserve_sim.experiment.file.plan import Experiment
from fineserve_sim.experiment.results.answer import DEFAULT_TARGETS, Targets
from fineserve_sim.experiment.results.summarised import summarised
from fineserve_sim.experiment.results.writer import write_results
from fineserve_sim.experiment.run.executor import Executor
from fineserve_sim.experiment.run.executors import lent
from fineserve_sim.experiment.run.files import alone_in, prepare, unwritable
from fineserve_sim.experiment.run.runner import OnProgress, Progress, Session
from fineserve_sim.experiment.run.slo import reference_runs
from fineserve_sim.experiment.run.store import Store
from fineserve_sim.experiment.run.work import Simulate


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
    targets: Targets = DEFAULT_TARGETS,
    executor: Executor | None = None,
    summary: bool = False,
) -> Path:
    """Simulate what ``out`` does not hold yet, write all results there and return the path of summary.json.

    Simulations run on ``executor``, or in ``jobs`` processes (default: one a core) if there is none: the same bytes.
    ``targets`` belong to the answer. With ``summary`` metrics alone are kept of the cells: no row a request and no sample.
    Percentiles are then right to half a percent. Runs that limits are taken from keep their rows. Raises ConfigError (unusable
    output folder included), ScenarioError for a cell that cannot run, Interrupted after Ctrl-C; finished simulations are kept
    then.
    """
    progress = Progress(len(reference_runs(experiment)) + len(experiment.points) * experiment.file.seeds, on_progress)
    with alone_in(out), _disk_errors(out), lent(executor, jobs) as lender:
        prepare(out)
        try:
            session = Session(Store(out), out, lender, decisions, simulate, progress, summarised if summary else None)
            outcomes = session.simulate_all(experiment)
            return write_results(experiment, outcomes, Store(out), out, targets)
        except KeyboardInterrupt:
            raise Interrupted(progress.done, progress.total) from None


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise unwritable(out, problem) from None
