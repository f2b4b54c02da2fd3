"""The program as functions, for scripts and notebooks: ``import fineserve_sim as fs`` (docs/python.md).

Each function does what the command of its name does and returns what it found. Results are kept in the folder ``out``, where
the same call goes on after an interruption; without one they live in a temporary folder as long as their ``Result``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import finalize

import pandas as pd

from fineserve_sim.experiment import (
    ConfigError,
    Experiment,
    experiment_for_trace,
    experiment_from,
    load_experiment,
    run_loaded,
)
from fineserve_sim.experiment.file.comparison import model_entries
from fineserve_sim.experiment.file.document import to_yaml
from fineserve_sim.experiment.results.summary import read_summary, runs_told
from fineserve_sim.experiment.run.executors import executor_of
from fineserve_sim.experiment.run.files import gone_if_unused
from fineserve_sim.experiment.run.runner import OnProgress
from fineserve_sim.experiment.show import frames

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from fineserve_sim.experiment.sizing import Answer

Found = TypeVar("Found", "Result", "Sizing")
Source = str | Path | Mapping[str, Any]
"""An experiment: the path of its YAML file, or what that file would hold."""


@dataclass(frozen=True, eq=False)
class Result:
    """A results folder. docs/experiments.md has its metrics, names and units.

    Large tables are read when first asked for. That raises ValueError if another run was written into the folder since.
    """

    folder: Path

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        return read_summary(self.folder)

    @cached_property
    def cells(self) -> pd.DataFrame:
        """A row a cell: its place, counts, each metric and the half-width of its 95 % interval."""
        return frames.cells_frame(self.summary)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """A row a request of every run, with ``ttft_s``, ``tpot_s`` and ``e2e_s``."""
        self._check_own()
        return frames.requests_frame(self.folder)

    @cached_property
    def placements(self) -> pd.DataFrame:
        """A row an instance of a model, with its GPUs; models without any say so in ``status``."""
        return frames.placements_frame(self.summary)

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """A row a sample (one in each second) and engine of every run: ``waiting``, ``running``, ``kv_used_bytes``."""
        return frames.timeline_frame(self.folder, self.summary)

    @cached_property
    def figures(self) -> dict[str, go.Figure]:
        """Figures that zoom, by ``sweep/metric``; each is a ``plotly.graph_objects.Figure``."""
        self._check_own()
        from fineserve_sim.experiment.show.page.figures import sweep_figures
        from fineserve_sim.experiment.show.page.style import figure_of

        return {name: figure_of(spec) for name, spec in sweep_figures(self.folder, self.summary).items()}

    def report(self, path: str | Path | None = None) -> Path:
        """Write the page that holds everything, ``report.html`` in the folder if no path is given; the path written."""
        self._check_own()
        from fineserve_sim.experiment.show.page.build import write_page

        return write_page([self.folder], self.folder / "report.html" if path is None else Path(path))

    def _check_own(self) -> None:
        own = {key for cell in self.summary["cells"] for key in cell["runs"]}
        if runs_told(self.folder) != own:
            raise ValueError(f"{self.folder}: another run is here since; give each run a folder of its own")

    def _repr_html_(self) -> str:
        """How a notebook shows it: the title and a row a cell."""
        from fineserve_sim.experiment.show.page.html import tag
        from fineserve_sim.experiment.show.page.overview import overview

        return tag("div", tag("h3", self.summary["title"]), overview(self.summary["cells"]))


@dataclass(frozen=True, eq=False)
class Sizing:
    """What a search found. ``table``: a row a system with its ``answer`` (NaN: nowhere in reach, and ``why`` says the reason),
    what it attains there and its GPU hours a million tokens. ``probes``: a row a value that was tried."""

    over: str
    table: pd.DataFrame
    probes: pd.DataFrame

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        return str(self.table.to_html(index=False))


@dataclass(frozen=True, eq=False)
class Plan:
    """What a search found. ``experiment``: the plan as ``run`` and ``size`` take it. ``judged``: shares of the requests on time
    in situations that the search never saw, beside those of ``best_system``, the best of the papers' systems."""

    experiment: dict[str, Any]
    judged: pd.DataFrame
    best_system: str


def run(
    experiment: Source,
    out: str | Path | None = None,
    *,
    seeds: int | None = None,
    jobs: int | None = None,
    executor: str = "local",
    overrides: Mapping[str, Any] | None = None,
    quick: bool = False,
    decisions: bool = False,
    on_progress: OnProgress | None = None,
) -> Result:
    """Run an experiment. ``overrides`` are dotted keys with their values, as ``--set`` takes them.

    ``jobs`` processes (one a core if not given) give the same results as one; a script that asks for several needs
    ``if __name__ == "__main__":``. ``executor``: where they run, as ``--executor`` takes it (``local``, ``ray`` or
    ``ray:HOST:PORT``). Raises ConfigError for a mistake in the experiment, ScenarioError for one that cannot run.
    """
    pairs = [(key, json.dumps(value)) for key, value in (overrides or {}).items()]
    _check_source(experiment)
    if isinstance(experiment, Mapping):
        loaded = experiment_from(experiment, overrides=pairs, quick=quick, seeds=seeds)
    else:
        loaded = load_experiment(Path(experiment), pairs, quick, seeds)
    return _result(loaded, out, jobs, executor, decisions, on_progress)


def compare(
    trace: str | Path,
    systems: Sequence[str],
    models: Sequence[str | Mapping[str, Any]],
    *,
    gpus: int = 1,
    gpu: str = "h100-sxm",
    ttft_slo_s: float | None = None,
    slo_scale: float = 20.0,
    rate_scale: float = 1.0,
    requests: int | None = None,
    spread: bool = False,
    anchors: bool = True,
    out: str | Path | None = None,
    jobs: int | None = None,
    executor: str = "local",
    decisions: bool = False,
    on_progress: OnProgress | None = None,
) -> Result:
    """Compare systems on a trace file. A model is ``NAME=MODEL:PRECISION:TP``, as on the command line, or an entry of an
    experiment's ``models``; ``spread`` deals the requests out evenly to them. Raises ConfigError, ScenarioError."""
    for name, given in (("systems", systems), ("models", models)):
        if isinstance(given, str) or not given:
            raise ValueError(f"{name}: must be a list of at least one, not {given!r}")
    loaded = experiment_for_trace(
        Path(trace),
        systems,
        model_entries(models, spread=spread),
        gpu=gpu,
        count=gpus,
        ttft_slo_s=ttft_slo_s,
        slo_scale=slo_scale,
        rate_scale=rate_scale,
        requests=requests,
        anchors=anchors,
    )
    return _result(loaded, out, jobs, executor, decisions, on_progress)


def size(
    experiment: Source,
    targets: Mapping[Literal["ttft", "tpot"], float],
    over: Literal["gpus", "rate", "slo_scale"] = "gpus",
    *,
    at: Mapping[str, Any] | None = None,
    most_gpus: int | None = None,
    precision: float = 0.05,
    quick: bool = False,
    out: str | Path | None = None,
    jobs: int | None = None,
    executor: str = "local",
    on_progress: OnProgress | None = None,
) -> Sizing:
    """The fewest GPUs, the highest rate or the tightest SLO at which each system meets the ``targets``, such as
    ``{"ttft": 0.99}``. ``at`` fixes other axes. Raises ConfigError, SizingError."""
    from fineserve_sim.experiment.sizing import axis_of, goal
    from fineserve_sim.experiment.sizing import size as search
    from fineserve_sim.experiment.sizing.probe import Prober

    _check_source(experiment)
    if not targets:
        raise ValueError('targets: give at least one, such as {"ttft": 0.99}')
    goals = [goal(f"{metric}:{share}") for metric, share in targets.items()]
    with _folder(out, jobs) as folder, executor_of(executor, jobs) as where:
        path = _written(experiment, folder) if isinstance(experiment, Mapping) else Path(experiment)
        prober = Prober(path, folder, goals, at=at, quick=quick, executor=where, on_progress=on_progress)
        found = list(search(prober, axis_of(over), most_gpus=most_gpus, precision=precision))
    sizing = Sizing(over, pd.DataFrame([_best(answer) for answer in found]), _probes(found))
    return _keeping(sizing, folder, out)


def plan(
    trace: str | Path,
    models: Sequence[str],
    *,
    gpus: int,
    ttft_slo_s: float,
    gpu: str = "h100-sxm",
    tpot_slo_s: float | None = None,
    e2e_slo_s: float | None = None,
    rate_scale: float = 1.0,
    load: float = 1.0,
    requests: int | None = None,
    spread: bool = False,
    target: float | None = None,
    evaluations: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    jobs: int | None = None,
    executor: str = "local",
) -> Plan:
    """The best plan that a search finds for a trace file on these GPUs; with a ``target``, on the fewest of them that keep it.

    A model is ``NAME=MODEL:PRECISIONS:DEGREES``, as on the command line. A search takes ``evaluations`` or ``seconds``, 60
    seconds if neither is given. Raises ConfigError, and ValueError where no plan is possible.
    """
    from fineserve_sim.planning import make

    wish = make.Wish(
        trace=Path(trace),
        models=tuple(map(make.model_wish, models)),
        gpus=gpus,
        ttft_slo_s=ttft_slo_s,
        gpu=gpu,
        tpot_slo_s=tpot_slo_s,
        e2e_slo_s=e2e_slo_s,
        rate_scale=rate_scale,
        load=load,
        requests=requests,
        spread=spread,
    )
    if evaluations is None and seconds is None:
        seconds = make.SECONDS
    with executor_of(executor, jobs) as where:
        found = make.found(wish, target, where, evaluations=evaluations, seconds=seconds, seed=seed)
    table = pd.DataFrame([asdict(each) for each in found.judged])
    return Plan(make.plan_document(found.wish, found.best.layout), table, found.best_system)


def read(folder: str | Path) -> Result:
    """The results that a run has left in a folder. Raises ValueError where there are none."""
    result = Result(Path(folder))
    _ = result.summary
    return result


def _result(
    experiment: Experiment,
    out: str | Path | None,
    jobs: int | None,
    executor: str,
    decisions: bool,
    on_progress: OnProgress | None,
) -> Result:
    with _folder(out, jobs) as folder, executor_of(executor, jobs) as where:
        run_loaded(experiment, folder, executor=where, decisions=decisions, on_progress=on_progress)
    return _keeping(read(folder), folder, out)


def _check_source(experiment: object) -> None:
    if not isinstance(experiment, str | Path | Mapping):
        raise ConfigError("", "experiment", f"must be a path or a mapping, not {type(experiment).__name__}")


@contextmanager
def _folder(out: str | Path | None, jobs: int | None) -> Iterator[Path]:
    """The folder that results go to. One of our own goes with any error, a new one with an error before there are results."""
    if out is not None and not str(out):
        raise ValueError("out: is empty; give a path, or leave it out")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs: must be a whole number above 0, not {jobs}")
    if out is not None:
        with gone_if_unused(Path(out)):
            yield Path(out)
        return
    folder = Path(mkdtemp(prefix="fineserve-"))
    try:
        yield folder
    except BaseException:
        rmtree(folder, ignore_errors=True)
        raise


def _keeping(found: Found, folder: Path, out: str | Path | None) -> Found:
    """What was found; a temporary folder goes with it."""
    if out is None:
        finalize(found, rmtree, folder, ignore_errors=True)
    return found


def _written(experiment: Mapping[str, Any], folder: Path) -> Path:
    """A mapping as a file, which a search loads anew for each question."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "experiment.yaml"
    checked = experiment_from(experiment)
    path.write_text(to_yaml({"folder": str(Path.cwd()), **checked.document.data}), encoding="utf-8")
    return path


def _best(answer: Answer) -> dict[str, Any]:
    from fineserve_sim.experiment.sizing.report import reasons

    row = {"system": answer.system, "title": answer.title}
    if answer.best is None:
        return row | {"answer": float("nan"), "why": " ".join(reasons([answer]))}
    return row | {
        "answer": answer.best.value,
        **answer.best.shares,
        "gpu_hours_per_mtoken": answer.best.gpu_hours_per_mtoken,
    }


def _probes(answers: Sequence[Answer]) -> pd.DataFrame:
    rows = []
    for answer in answers:
        for probe in answer.probes:
            rest = {name: value for name, value in asdict(probe).items() if name != "shares"}
            rows.append({"system": answer.system, **rest, **probe.shares})
    return pd.DataFrame(rows)
