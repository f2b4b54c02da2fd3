"""Measuring as a command: ``fineserve-calibrate --gpu NAME``, and ``python3 -m fineserve_calibrate.probes`` with less."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from fineserve_calibrate.probes.backend import Backend
from fineserve_calibrate.probes.devices import check_wanted, find_gpu
from fineserve_calibrate.probes.models import LLAMA_8B, ONE_LAYER, TINY, ProbedModel, model_from
from fineserve_calibrate.probes.plan import plan
from fineserve_calibrate.probes.session import Session, default_folder, select


def _device(gpu: str, model: ProbedModel) -> Backend:
    found = None if gpu == "cpu" else find_gpu(gpu)
    from fineserve_calibrate.probes.operators import TorchBackend

    return TorchBackend(found, {known.name: known for known in (model, ONE_LAYER)})


def probe(gpu: str, quick: bool, out: Path | None, model: Path | None, only: str | None, console: Console) -> Path:
    """Measure the device ``gpu`` and write its finished parts into ``out``; the folder.

    Raises ProbeError, before anything is written, for an unknown name, no GPU, another GPU, or missing libraries; and when
    the device stops working.
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
