"""The program as functions, for scripts and notebooks: ``import fineserve_sim as fs`` (docs/python.md).

Each function does what the command of its name does and returns what it found. Results are kept in the folder ``out``, where
the same call goes on after an interruption; without one they live in a temporary folder as long as their ``Result``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import finalize

import pandas as pd

from fineserve_sim.experiment import (
    ConfigError,
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
from fineserve_sim.experiment.show.answer import answer_of
from fineserve_sim.experiment.sizing import axis_of
from fineserve_sim.experiment.sizing import goals as goals_of
from fineserve_sim.experiment.sizing.around import search_around
from fineserve_sim.experiment.sizing.parting import parted
from fineserve_sim.experiment.sizing.probe import Prober
from fineserve_sim.experiment.sizing.question import Asked, Limits, Load, check_trace, file_of, shares_of, slo_scale_of
from fineserve_sim.experiment.sizing.variants import variants

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from fineserve_sim.experiment.sizing import Answer
    from fineserve_sim.planning.find import Budget
    from fineserve_sim.planning.question import Question

Value = TypeVar("Value", str, int)
Source = str | Path | Mapping[str, Any]
"""An experiment: the path of its YAML file, or what that file would hold."""
Targets = Mapping[str, float]
"""Shares by moment, of ``ttft``, ``tpot``, ``e2e`` or ``all``."""


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

    @property
    def answer(self) -> str:
        """What to take and why, in the words of the screen; empty where there was nothing to choose."""
        return "\n".join(answer_of(self.summary))

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
        from fineserve_sim.experiment.show.page.build import sweep_figures
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
    what it attains there and its GPU hours a million tokens. ``probes``: a row a value that was tried. ``answer``: in words, as
    on the screen. ``result``: of the cluster to take, or else the closest; None where none could be built."""

    over: str
    table: pd.DataFrame
    probes: pd.DataFrame
    answer: str
    result: Result | None

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        return str(self.table.to_html(index=False))


@dataclass(frozen=True, eq=False)
class Plan:
    """What a search found. ``experiment``: the plan as ``run`` and ``size`` take it. ``judged``: shares of the requests on
    time in situations that the search never saw, beside the shares of ``best_system``, the best of the papers' systems.
    ``answer``: in words."""

    experiment: dict[str, Any]
    judged: pd.DataFrame
    best_system: str
    answer: str


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
    targets: Targets | None = None,
    price: float | None = None,
    on_progress: OnProgress | None = None,
) -> Result:
    """Run an experiment. ``overrides`` are dotted keys with their values, as ``--set`` takes them. ``targets`` of the answer,
    such as ``{"all": 0.99}``; ``price``: dollars a GPU-hour.

    ``jobs`` processes (one a core if not given) give the same results as one; a script that asks for several needs
    ``if __name__ == "__main__":``. ``executor``: where they run, as ``--executor`` takes it (``local``, ``ray`` or
    ``ray:HOST:PORT``). Raises ConfigError for a mistake in the experiment, ScenarioError for one that cannot run.
    """
    pairs = _pairs(overrides) + ([] if price is None else [("cluster.usd_per_gpu_hour", str(price))])
    _check_source(experiment)
    if isinstance(experiment, Mapping):
        loaded = experiment_from(experiment, overrides=pairs, quick=quick, seeds=seeds)
    else:
        loaded = load_experiment(Path(experiment), pairs, quick, seeds)
    slo = loaded.setup.slo
    wanted = shares_of(_goals(targets), slo.tpot_s or slo.tpot, slo.e2e_s)
    with _folder(out, jobs) as folder, executor_of(executor, jobs) as where:
        run_loaded(loaded, folder, executor=where, decisions=decisions, on_progress=on_progress, targets=wanted)
    return _keeping(read(folder), folder, out)


def compare(
    trace: str | Path,
    systems: Sequence[str],
    models: Sequence[str | Mapping[str, Any]],
    *,
    gpu: str = "h100-sxm",
    gpus: int = 1,
    sharing: str | Mapping[str, str] | None = None,
    ttft_slo_s: float | None = None,
    tpot_slo_s: float | None = None,
    e2e_slo_s: float | None = None,
    slo_scale: float | None = None,
    rate_scale: float | None = None,
    requests: int | None = None,
    spread: bool | Mapping[str, float] = False,
    targets: Targets | None = None,
    price: float | None = None,
    margin: float | None = None,
    seeds: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    search: bool = True,
    anchors: bool = True,
    out: str | Path | None = None,
    jobs: int | None = None,
    executor: str = "local",
    decisions: bool = False,
    on_progress: OnProgress | None = None,
) -> Result:
    """Compare systems on a trace file, at the rate where they part if no ``rate_scale`` is given.

    A model is ``NAME=MODEL:PRECISION:TP``, as on the command line, or an entry of an experiment's ``models``; ``spread`` deals
    the requests out to them, evenly or by shares. With a ``margin`` steps take so many times as long as predicted. ``targets``:
    such as ``{"all": 0.99}``. With ``search`` the answer says where it breaks and how many GPUs it needs. Raises ConfigError,
    ScenarioError.
    """
    for name, given in (("systems", systems), ("models", models)):
        if isinstance(given, str) or not given:
            raise ValueError(f"{name}: must be a list of at least one, not {given!r}")
    experiment_at = partial(
        experiment_for_trace,
        Path(trace),
        systems,
        model_entries(models, spread=spread),
        gpu=gpu,
        count=gpus,
        sharing=sharing,
        ttft_slo_s=ttft_slo_s,
        tpot_slo_s=tpot_slo_s,
        e2e_slo_s=e2e_slo_s,
        slo_scale=slo_scale_of(slo_scale, ttft_slo_s),
        requests=requests,
        usd_per_gpu_hour=price,
        margin=margin,
        seeds=1 if seeds is None else seeds,
        overrides=_pairs(overrides),
        anchors=anchors,
    )
    loaded = experiment_at(rate_scale=1.0 if rate_scale is None else rate_scale)
    wanted = shares_of(_goals(targets), tpot_slo_s, e2e_slo_s)
    with _folder(out, jobs) as folder, executor_of(executor, jobs) as where:
        if rate_scale is None:
            loaded = parted(lambda rate: experiment_at(rate_scale=rate), folder, where, wanted, on_progress)
        run_loaded(loaded, folder, executor=where, decisions=decisions, on_progress=on_progress, targets=wanted)
        if search:
            search_around(folder, executor=where, on_progress=on_progress)
    return _keeping(read(folder), folder, out)


def size(
    source: Source,
    targets: Targets,
    over: Literal["gpus", "rate", "slo_scale"] = "gpus",
    *,
    at: Mapping[str, Any] | None = None,
    gpu: str | Sequence[str] | None = None,
    mix: bool = False,
    tp: int | Sequence[int] | None = None,
    most_gpus: int | None = None,
    precision: float = 0.05,
    price: float | Mapping[str, float] | None = None,
    ttft_slo_s: float | None = None,
    tpot_slo_s: float | None = None,
    e2e_slo_s: float | None = None,
    slo_scale: float | None = None,
    models: Sequence[str | Mapping[str, Any]] | None = None,
    systems: Sequence[str] | None = None,
    rate_scale: float | None = None,
    requests: int | None = None,
    spread: bool | Mapping[str, float] = False,
    margin: float | None = None,
    seeds: int | None = None,
    quick: bool = False,
    out: str | Path | None = None,
    jobs: int | None = None,
    executor: str = "local",
    on_progress: OnProgress | None = None,
) -> Sizing:
    """The fewest GPUs, the highest rate or the tightest SLO at which each system meets the ``targets``, such as
    ``{"ttft": 0.99}``. ``source``: a trace with its ``models``, an experiment or a results folder. ``at`` fixes other axes;
    several types of ``gpu`` and degrees ``tp`` are all tried, each at its ``price``, with ``mix`` two types together as well.
    Raises ConfigError, SizingError."""
    from fineserve_sim.experiment.sizing.found import search
    from fineserve_sim.experiment.sizing.mixes import kinds_of

    _check_source(source)
    if not targets:
        raise ValueError('targets: give at least one, such as {"ttft": 0.99}')
    axis, goals = axis_of(over), goals_of(_goals(targets) or [])
    prices = _prices(price)
    tried = variants(_several(gpu), _several(tp), prices)
    mixed = kinds_of(_several(gpu), prices, axis) if mix else []
    limits, load = Limits(ttft_slo_s, tpot_slo_s, e2e_slo_s, slo_scale), Load(models, requests, spread, rate_scale)
    if not isinstance(source, Mapping) and file_of(Path(source)) is None:
        check_trace(_goals(targets), limits, quick=quick)
    with _folder(out, jobs) as folder, executor_of(executor, jobs) as where:
        path = _written(source, folder) if isinstance(source, Mapping) else Path(source)
        asked = Asked(limits, load, systems, seeds, at, most_gpus, margin).of(path, folder, axis)
        prober = Prober(asked.path, folder, goals, asked.overrides, asked.place, quick, None, where, on_progress)
        found = search(prober, tried, axis, folder, mixed=mixed, most_gpus=asked.most_gpus, precision=precision)
    told = "\n".join([*([asked.said] if asked.said else []), found.headline, *found.reasons])
    table = pd.DataFrame([_best(answer) for answer in found.answers])
    result = _keeping(Result(folder), folder, out) if found.summary is not None else None
    if result is None and out is None:
        rmtree(folder, ignore_errors=True)
    return Sizing(over, table, _probes(found.answers), told, result)


def plan(
    trace: str | Path,
    models: Sequence[str] | None = None,
    *,
    like: str | Path | None = None,
    gpus: int | Mapping[str, int],
    ttft_slo_s: float,
    gpu: str | Sequence[str] | None = None,
    price: float | Mapping[str, float] | None = None,
    tpot_slo_s: float | None = None,
    e2e_slo_s: float | None = None,
    rate_scale: float = 1.0,
    load: float = 1.0,
    requests: int | None = None,
    spread: bool | Mapping[str, float] = False,
    margin: float | None = None,
    apart: Sequence[Sequence[str]] | None = None,
    pin: Mapping[str, Sequence[int]] | None = None,
    most_per_gpu: int | None = None,
    survive: Literal["gpu", "node"] | None = None,
    target: float | Targets | None = None,
    every_s: float | None = None,
    seconds: float | None = None,
    evaluations: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    jobs: int | None = None,
    executor: str = "local",
) -> Plan:
    """The best plan that a search finds for a trace file on these GPUs; with a ``target``, on the fewest of them that keep it.

    A model is ``NAME=MODEL:PRECISIONS:DEGREES``, as on the command line; or models and engines come from the file ``like``,
    and its GPU where none is given. ``gpus``: a number, or numbers by kind, such as ``{"h100-sxm": 4, "l40s": 8}``.
    ``target``: 0.95 of all requests, or ``{"all": 0.95, "each:all": 0.9}``. With it, of several kinds in ``gpus`` or ``gpu``
    the cheapest is taken, each at its ``price``, and of kinds in ``gpus`` mixes, too. ``apart``: pairs of models that share no
    GPU; ``pin``: GPUs by model; ``survive``: every model outlives the loss of any one GPU or node. A search takes
    ``evaluations`` or ``seconds``, 60 seconds if neither is given. ``out``: a folder for ``plan.yaml`` and its page. With
    ``every_s`` each stretch of so many seconds has a placement, chosen by the one before; ``judged`` has a row a stretch then,
    or none where Ctrl-C stopped the search. Raises
    ConfigError, and ValueError where no plan is possible.
    """
    from fineserve_sim.planning import like as planning_like
    from fineserve_sim.planning.question import budget, question
    from fineserve_sim.planning.target import target_of

    wanted, taken = planning_like.wanted(models, None if like is None else Path(like))
    rules: dict[str, Any] = {"apart": apart or (), "pin": pin or {}, "most_per_gpu": most_per_gpu, "survive": survive}
    wished: dict[str, Any] = {"ttft_slo_s": ttft_slo_s, "tpot_slo_s": tpot_slo_s, "e2e_slo_s": e2e_slo_s}
    wished |= {"rate_scale": rate_scale, "load": load, "requests": requests, "spread": spread, "margin": margin}
    kinds, prices = _several(gpu), _prices(price)
    asked = question(Path(trace), wanted, taken, gpus, kinds, prices, target_of(target), **rules, **wished)
    path = None if out is None else Path(out) / "plan.yaml"
    with executor_of(executor, jobs) as where:
        own = budget(evaluations, seconds, seed, executor=where)
        return _planned(asked, own, path) if every_s is None else _planned_in_time(asked, every_s, own, path)


def _planned(asked: Question, budget: Budget, path: Path | None) -> Plan:
    """A plan, in its file with its page if it is to have one."""
    from fineserve_sim.planning import make, page, words

    found = make.found(asked, budget)
    document = _saved(found.document, path)
    if path is not None:
        page.write_page(page.shown(found, path, asked.prices), path.parent / page.PAGE)
    return Plan(document, pd.DataFrame([asdict(each) for each in found.judged]), found.best_system, words.answer(found))


def _planned_in_time(asked: Question, every_s: float, budget: Budget, path: Path | None) -> Plan:
    """The same of a plan in time; one that was stopped is not judged."""
    from fineserve_sim.planning import in_time, words

    in_time.check(asked.wish, asked.target)
    timetable = in_time.planned(asked.wish, every_s, budget)
    document = _saved(in_time.document(timetable), path)
    if timetable.stopped:
        return Plan(document, pd.DataFrame(), "prism", words.STOPPED)
    timed = in_time.judged(timetable)
    return Plan(document, in_time.table(timed), "prism", words.in_time(timed))


def _saved(document: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """The document, also in its file if it is to have one."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_yaml(document), encoding="utf-8")
    return document


def read(folder: str | Path) -> Result:
    """The results that a run has left in a folder. Raises ValueError where there are none."""
    result = Result(Path(folder))
    _ = result.summary
    return result


def _pairs(overrides: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Dotted keys with their values as YAML."""
    return [(key, json.dumps(value)) for key, value in (overrides or {}).items()]


def _goals(targets: Targets | None) -> list[str] | None:
    """Targets as the command line has them: ``["ttft:0.99"]``."""
    return [f"{moment}:{share}" for moment, share in targets.items()] if isinstance(targets, Mapping) else targets


def _prices(price: float | Mapping[str, float] | None) -> dict[str, float]:
    """Prices by type of GPU; one for all is under the empty name."""
    return dict(price) if isinstance(price, Mapping) else {} if price is None else {"": price}


def _several(given: Value | Sequence[Value] | None) -> list[Value]:
    """One or several of them as a list."""
    if given is None:
        return []
    return [given] if isinstance(given, str | int) else list(given)


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


def _keeping(found: Result, folder: Path, out: str | Path | None) -> Result:
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
    from fineserve_sim.experiment.show.sizes import reasons
    from fineserve_sim.experiment.sizing.report import answer_json

    row = {"system": answer.system, "title": answer.title}
    if answer.best is None:
        return row | {"answer": float("nan"), "why": " ".join(reasons([answer_json(answer)]))}
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
