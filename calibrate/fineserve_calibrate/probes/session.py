"""One run of the probes: ``fineserve-calibrate --gpu NAME``, or ``python3 -m fineserve_calibrate.probes`` with fewer packages.

A run measures the parts that are not finished yet. It needs numpy and rich beside what is probed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from fineserve_calibrate.probes.engines import LLAMA_8B, ONE_LAYER, TINY, ProbedModel, model_from
from fineserve_calibrate.probes.nvidia import check_wanted, find_gpu
from fineserve_calibrate.probes.parts import Part, finished, run_part, write_part
from fineserve_calibrate.probes.plan import plan
from fineserve_calibrate.probes.schema import Backend, ProbeError


@dataclass(frozen=True, slots=True)
class Session:
    """A device, the folder for its results, and the effort behind them (``quick`` or ``full``)."""

    backend: Backend
    folder: Path
    effort: str
    console: Console

    def measure(self, parts: Sequence[Part]) -> None:
        """Measure every part that is not finished. Raises ProbeError when the device stops working."""
        missing = [part for part in parts if not finished(self.folder, part, self.backend.identity)]
        if len(missing) < len(parts):
            self.say(f"{len(parts) - len(missing)} of {len(parts)} parts are finished already")
        with self._progress() as progress:
            task = progress.add_task("", total=sum(part.expected_s for part in missing))
            for part in missing:
                progress.update(task, description=part.name)
                self._run(part, progress, task)

    def _run(self, part: Part, progress: Progress, task: TaskID) -> None:
        each_s = part.expected_s / max(1, len(part.points))

        def advance(points: int) -> None:
            progress.advance(task, points * each_s)

        outcome = run_part(part, self.backend, advance)
        write_part(self.folder, part, self.backend.identity, self.effort, outcome)
        if outcome.device_lost:
            point, reason = outcome.unavailable[-1]
            where = ", ".join(f"{name} {value}" for name, value in point.items())
            raise ProbeError(
                f"{part.name}: the device does not answer any more after {reason} ({where}); the same command goes on "
                "with the other parts"
            )

    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description:42}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        return Progress(*columns, console=self.console, transient=not self.console.is_terminal)

    def say(self, text: str) -> None:
        """Print a line for the user."""
        self.console.print(text, highlight=False, soft_wrap=True)


def default_folder(backend: Backend, on_cpu: bool, quick: bool) -> Path:
    """Name the folder ``calibration/DEVICE``, with ``-quick`` behind it for a quick run."""
    device = "cpu" if on_cpu else backend.spec.name if backend.spec else backend.identity.device
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return Path("calibration") / (f"{slug}-quick" if quick else slug)


def select(parts: Sequence[Part], only: str | None) -> list[Part]:
    """Select the parts whose name contains ``only``. Raises ProbeError when none does."""
    chosen = [part for part in parts if only is None or only in part.name]
    if not chosen:
        raise ProbeError(f"--only {only}: no such part; parts: {', '.join(part.name for part in parts)}")
    return chosen


def _device(gpu: str, model: ProbedModel) -> Backend:
    found = None if gpu == "cpu" else find_gpu(gpu)
    from fineserve_calibrate.probes.operators import TorchBackend

    return TorchBackend(found, {known.name: known for known in (model, ONE_LAYER)})


def probe(gpu: str, quick: bool, out: Path | None, model: Path | None, only: str | None, console: Console) -> Path:
    """Measure the device ``gpu``, write its finished parts into ``out``, and return the folder.

    Raises ProbeError, before anything is written, for an unknown name, no GPU, another GPU, or missing libraries. Raises it
    later when the device stops working.
    """
    check_wanted(gpu)
    on_cpu = gpu == "cpu"
    probed = model_from(model) if model else TINY if on_cpu else LLAMA_8B
    effort = "quick" if quick else "full"
    parts = select(plan(on_cpu, quick, probed.name), only)
    backend = _device(gpu, probed)
    folder = out or default_folder(backend, on_cpu, quick)
    session = Session(backend, folder, effort, console)
    session.say(f"{backend.identity.device}: {len(parts)} parts, {effort}, into {folder}")
    try:
        session.measure(parts)
    finally:
        backend.close()
    return folder
