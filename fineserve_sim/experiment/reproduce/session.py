"""``reproduce``: which claims, which experiments they need, and the verdict on each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fineserve_sim.experiment import analytic
from fineserve_sim.experiment.file.errors import ConfigError, Interrupted, ScenarioError
from fineserve_sim.experiment.file.load import load_experiment
from fineserve_sim.experiment.file.plan import Experiment
from fineserve_sim.experiment.reproduce import declared
from fineserve_sim.experiment.reproduce.evaluators import SIMULATED
from fineserve_sim.experiment.reproduce.gpu_claims import calibrator_verdicts
from fineserve_sim.experiment.reproduce.judge import Evaluation, Quantity, Verdict, judge
from fineserve_sim.experiment.reproduce.ledger import LedgerError, Target
from fineserve_sim.experiment.reproduce.measured import MissingError, Results
from fineserve_sim.experiment.reproduce.undecided import GPU, REASONS
from fineserve_sim.experiment.results.produce import run_loaded
from fineserve_sim.experiment.run.runner import OnProgress
from fineserve_sim.experiment.run.slo import reference_runs

OnExperiment = Callable[[str], None]


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
    on_progress: OnProgress | None = None,
) -> list[Row]:
    """Run what the targets need, below ``out``, and judge each. Finished simulations are kept and taken up again.

    Raises Interrupted after Ctrl-C. An experiment that is missing, broken or cannot run leaves its claims undecided.
    """
    sources = _Sources(targets, experiments)
    readable = experiments.readable
    names = [name for name in readable if name in sources.needed]
    progress = _Progress([readable[name] for name in names], on_progress)
    problems = dict(experiments.broken)
    for name in names:
        try:
            run_loaded(readable[name], out / name, jobs=jobs, on_progress=progress.count)
        except Interrupted:
            raise Interrupted(progress.done, progress.total) from None
        except (ConfigError, ScenarioError) as problem:
            problems[name] = f"experiments/{name}.yaml: {problem}"
        progress.finish(name)
    results = Results(out, problems)
    return [sources.row(target, results) for target in targets]


class _Progress:
    """Simulations of several experiments as one count."""

    def __init__(self, experiments: Sequence[Experiment], tell: OnProgress | None) -> None:
        self._tell = tell
        self._sizes = {each.name: _simulations(each) for each in experiments}
        self._before = 0
        self.total = sum(self._sizes.values())
        self.done = 0

    def count(self, done: int, _: int, what: str) -> None:
        self.done = self._before + done
        if self._tell is not None:
            self._tell(self.done, self.total, what)

    def finish(self, name: str) -> None:
        self._before += self._sizes[name]
        self.done = self._before


def _simulations(experiment: Experiment) -> int:
    return len(reference_runs(experiment)) + len(experiment.points) * experiment.file.seeds


class _Sources:
    """What decides each target: an evaluator over experiments, claims that experiment files state, analysis, a GPU."""

    def __init__(self, targets: Sequence[Target], experiments: Experiments) -> None:
        self._experiments = experiments
        self._declared = declared.declaring(experiments.readable.values())
        self._analytic = analytic.evaluators()
        known = [target for target in targets if target.known]
        self.needed = {name for target in known for name in self._names(target.id)}
        gpu = any(target.backend == "calibrator-gpu" for target in known)
        self._gpu = calibrator_verdicts() if gpu else {}

    def _names(self, claim: str) -> Sequence[str]:
        return SIMULATED[claim].experiments if claim in SIMULATED else self._declared.get(claim, ())

    def row(self, target: Target, results: Results) -> Row:
        """The verdict on one target, or why there is none here."""
        if not target.known:
            return Row(target, "not decidable here", reason="No evaluator knows this claim.")
        measured = self._gpu.get(target.id)
        if measured and measured[0] != "not decidable here":
            verdict: Verdict = "input" if target.role != "claim" else measured[0]
            return Row(target, verdict, reason=measured[1], by="calibrator")
        try:
            evaluation, by = self._evaluate(target.id, results)
        except MissingError as problem:
            return Row(target, "not decidable here", reason=str(problem), failed=self._lacks(target.id, results))
        if evaluation is None:
            return self._undecided(target, measured)
        return Row(target, judge(target, evaluation), evaluation.quantities, evaluation.detail, by)

    def _lacks(self, claim: str, results: Results) -> bool:
        """Whether an experiment of the claim is not there, rather than without an answer."""
        return any(name not in self._experiments.readable or not results.has(name) for name in self._names(claim))

    def _evaluate(self, claim: str, results: Results) -> tuple[Evaluation | None, str]:
        if claim in SIMULATED:
            evaluator = SIMULATED[claim]
            for name in evaluator.experiments:
                if name not in self._experiments.readable and name not in self._experiments.broken:
                    raise MissingError(f"There is no experiments/{name}.yaml.")
                results.summary(name)
            return evaluator.evaluate(results), ", ".join(evaluator.experiments) or "policy core"
        if claim in self._declared:
            names = self._declared[claim]
            return declared.evaluate(claim, names, results), ", ".join(names)
        name = claim.replace("-", "_").replace(".", "_")
        if name in self._analytic:
            finding = self._analytic[name]()
            values = finding.value if isinstance(finding.value, tuple) else (finding.value,)
            return Evaluation(tuple(Quantity(value) for value in values), finding.detail), "analysis"
        return None, ""

    def _undecided(self, target: Target, measured: tuple[Verdict, str] | None) -> Row:
        """Nobody answers a claim: it takes a GPU, or lacks data, or its experiment file is not there."""
        if measured:
            return Row(target, "not decidable here", reason=measured[1])
        if target.id in REASONS:
            return Row(target, "not decidable here", reason=REASONS[target.id])
        if target.backend == "calibrator-gpu":
            return Row(target, "not decidable here", reason=GPU)
        broken = "; ".join(self._experiments.broken.values())
        reason = "No experiment file states this claim" + (f" ({broken})." if broken else ".")
        return Row(target, "not decidable here", reason=reason, failed=True)
