"""``reproduce``: which claims, which experiments they need, and the verdict on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from fineserve_sim.experiment.file.errors import ConfigError, Interrupted, ScenarioError
from fineserve_sim.experiment.file.load import load_experiment
from fineserve_sim.experiment.file.plan import Experiment
from fineserve_sim.experiment.reproduce import calibrator, declared
from fineserve_sim.experiment.reproduce.finished import MissingError, Results
from fineserve_sim.experiment.reproduce.judge import UNDECIDED, Evaluation, Quantity, Verdict, judge, undecided
from fineserve_sim.experiment.reproduce.ledger import LedgerError, Target
from fineserve_sim.experiment.reproduce.papers import DECIDERS
from fineserve_sim.experiment.reproduce.registry import Decider
from fineserve_sim.experiment.results.produce import run_loaded
from fineserve_sim.experiment.run.executor import Executor
from fineserve_sim.experiment.run.executors import lent
from fineserve_sim.experiment.run.runner import OnProgress
from fineserve_sim.experiment.run.slo import reference_runs


@dataclass(frozen=True, slots=True)
class Row:
    """A claim with our numbers and the verdict. ``by``: what decided it, an experiment's name or a kind of evidence.
    ``failed``: an experiment that it needs is missing, broken or could not run."""

    target: Target
    verdict: Verdict
    quantities: tuple[Quantity, ...] = ()
    reason: str = ""
    by: str = ""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Experiments:
    """The experiments of a folder by name, and those that cannot be read, with the mistake in one line."""

    readable: Mapping[str, Experiment] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)


def load_all(folder: Path, quick: bool) -> Experiments:
    """Every experiment of a folder. Raises LedgerError for a folder without any."""
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise LedgerError(f"{folder}: no experiment files there; run from the project's folder, or give --experiments")
    readable, broken = {}, {}
    for path in paths:
        try:
            readable[path.stem] = load_experiment(path, quick=quick)
        except ConfigError as problem:
            broken[path.stem] = str(problem)
    return Experiments(readable, broken)


def reproduce(
    targets: Sequence[Target],
    experiments: Experiments,
    out: Path,
    *,
    jobs: int | None = None,
    executor: Executor | None = None,
    on_progress: OnProgress | None = None,
) -> list[Row]:
    """Run what the targets need, below ``out``, and judge each. Finished simulations are kept and taken up again. ``executor``
    and ``jobs`` are as in ``run_loaded``.

    Raises Interrupted after Ctrl-C. An experiment that is missing, broken or cannot run leaves its claims undecided.
    """
    deciders = _Deciders(targets, experiments)
    readable = experiments.readable
    names = [name for name in readable if name in deciders.needed]
    progress = _Progress([readable[name] for name in names], on_progress)
    problems = dict(experiments.broken)
    with lent(executor, jobs) as lender:
        for name in names:
            try:
                run_loaded(readable[name], out / name, executor=lender, on_progress=progress.count)
            except Interrupted:
                raise Interrupted(progress.done, progress.total) from None
            except (ConfigError, ScenarioError) as problem:
                problems[name] = f"experiments/{name}.yaml: {problem}"
            progress.finish(name)
    results = Results(out, problems)
    return [deciders.row(target, results) for target in targets]


def needs(target: Target, experiments: Experiments) -> frozenset[str]:
    """The experiments, by name, whose results decide the target."""
    return frozenset(_Deciders([target], experiments).needed)


class _Progress:
    """Simulations of several experiments as one count."""

    def __init__(self, experiments: Sequence[Experiment], tell: OnProgress | None) -> None:
        self._tell = tell
        self._sizes = {each.name: _simulations(each) for each in experiments}
        self._before = 0
        self.total = sum(self._sizes.values())
        self.done = 0

    def count(self, done: float, _: int, what: str) -> None:
        self.done = self._before + int(done)
        if self._tell is not None:
            self._tell(self._before + done, self.total, what)

    def finish(self, name: str) -> None:
        self._before += self._sizes[name]
        self.done = self._before


def _simulations(experiment: Experiment) -> int:
    return len(reference_runs(experiment)) + len(experiment.points) * experiment.file.seeds


class _Deciders:
    """What decides each target: an evaluator of ``papers``, a claim that experiment files state, the calibrator; in this order,
    but that what was measured on a GPU goes first."""

    def __init__(self, targets: Sequence[Target], experiments: Experiments) -> None:
        self._experiments = experiments
        self._found = {**declared.deciders(experiments.readable.values()), **DECIDERS}
        known = [target for target in targets if target.known]
        self.needed = {name for each in known if each.id in self._found for name in self._found[each.id].needs}
        self._gpu = any(target.backend == "calibrator-gpu" for target in known)

    @cached_property
    def _measured(self) -> dict[str, Evaluation]:
        """The measured answers of a GPU. The calibrator is asked once, and only when a verdict needs it."""
        return calibrator.answers() if self._gpu else {}

    def row(self, target: Target, results: Results) -> Row:
        """The verdict on one target, or why there is none here."""
        measured = self._measured.get(target.id)
        decider = self._found.get(target.id)
        if not target.known:
            return _row(target, undecided("No evaluator knows this claim."))
        if measured and measured.verdict != UNDECIDED:
            return _row(target, measured, by="calibrator")
        if decider is None:
            return self._open(target, measured)
        try:
            self._check_there(decider, results)
            evaluation = decider.decide(results)
        except MissingError as problem:
            lacking = any(name not in self._experiments.readable or not results.has(name) for name in decider.needs)
            return _row(target, undecided(str(problem)), failed=lacking)
        return _row(target, evaluation, by=decider.by)

    def _check_there(self, decider: Decider, results: Results) -> None:
        """Raises MissingError for an experiment without file or results."""
        for name in decider.needs:
            if name not in self._experiments.readable and name not in self._experiments.broken:
                raise MissingError(f"There is no experiments/{name}.yaml.")
            results.summary(name)

    def _open(self, target: Target, measured: Evaluation | None) -> Row:
        """The claim has no answer: it takes a GPU, or lacks data, or its experiment file is not there."""
        if measured:
            return _row(target, measured)
        if target.undecidable:
            return _row(target, undecided(target.undecidable))
        if target.backend == "calibrator-gpu":
            return _row(target, undecided(calibrator.NOT_INSTALLED))
        broken = "; ".join(self._experiments.broken.values())
        reason = "No experiment file states this claim" + (f" ({broken})." if broken else ".")
        return _row(target, undecided(reason), failed=True)


def _row(target: Target, evaluation: Evaluation, *, by: str = "", failed: bool = False) -> Row:
    return Row(target, judge(target, evaluation), evaluation.quantities, evaluation.detail, by, failed)
