"""What a search found, in its folder: the answers as data and a figure, and the whole results of the cluster to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fineserve_sim.experiment.results.produce import run_loaded
from fineserve_sim.experiment.results.summary import read_summary
from fineserve_sim.experiment.run.files import prepare, write_json
from fineserve_sim.experiment.show.against import search_against
from fineserve_sim.experiment.show.answer import limits_text
from fineserve_sim.experiment.show.sizes import headline, reasons
from fineserve_sim.experiment.sizing.changes import Found, closest, place_of, size_changed
from fineserve_sim.experiment.sizing.mixes import Kind, size_mixed
from fineserve_sim.experiment.sizing.probe import Prober
from fineserve_sim.experiment.sizing.report import as_json, draw
from fineserve_sim.experiment.sizing.search import Answer, Axis, to_take
from fineserve_sim.experiment.sizing.sure import with_bands
from fineserve_sim.experiment.sizing.variants import Variant, size_all


@dataclass(frozen=True, slots=True)
class Searched:
    """``data``: as size.json has it. ``summary``: of the cluster to take, or else of the closest; None where none could be
    built."""

    answers: Sequence[Answer]
    data: Mapping[str, Any]
    summary: Mapping[str, Any] | None

    @property
    def headline(self) -> str:
        return headline(self.data)

    @property
    def reasons(self) -> list[str]:
        """Why some have no answer, and what the one to take costs against dedicated GPUs."""
        told = search_against(self.data)
        return [*([told] if told else []), *reasons(self.data["systems"])]


def search(
    prober: Prober,
    tried: Sequence[Variant],
    axis: Axis,
    folder: Path,
    *,
    mixed: Sequence[Kind] = (),
    most_gpus: int | None,
    precision: float,
) -> Searched:
    """Search all variants and the mixes of two of the kinds ``mixed``; where none holds, other precisions and degrees of the
    worst model. The cheapest on each type of GPU has its band. Errors as of ``size``."""
    found = list(size_all(prober, tried, axis, most_gpus=most_gpus, precision=precision))
    degrees = list(dict.fromkeys(variant.tp for variant in tried))
    found += size_mixed(prober, found, mixed, degrees, most_gpus=most_gpus)
    found += size_changed(found, axis, most_gpus=most_gpus, precision=precision)
    return _written(list(with_bands(found, axis, most_gpus)), axis, prober, folder)


def _written(found: Found, axis: Axis, prober: Prober, folder: Path) -> Searched:
    """The answers as data and a figure; the one to take, or else the closest, with its models and GPUs."""
    answers = [answer for answer, _ in found]
    chosen = to_take(answers, axis)
    shown = closest(found) if chosen is None else next(each for each in found if each[0] is chosen)
    summary = None
    if shown is not None:
        value = place_of(*shown, axis) if chosen is None or chosen.best is None else chosen.best.value
        summary = read_summary(_in_full(*shown, axis.key, value, folder).parent)
    else:
        (folder / "summary.json").unlink(missing_ok=True)  # the answer of another search
    title = prober.file().file.title
    data = as_json(answers, axis, prober.goals, title, found=summary is not None)
    prepare(folder)
    write_json(folder / "size.json", data)
    limits = limits_text(summary["cells"][0]) if summary is not None and axis.key != "slo_scale" else ""
    draw(data, folder, limits)
    return Searched(answers, data, summary)


def _in_full(answer: Answer, prober: Prober, key: str, value: float, folder: Path) -> Path:
    """The whole results of an answer's system at one value: a results folder like any other."""
    experiment = prober.experiment(answer.system, key, value)
    return run_loaded(experiment, folder, executor=prober.executor, targets=prober.targets)
