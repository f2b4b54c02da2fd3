"""Trials of the runtime: its check, its demo, a replay of two models, what the slab costs a step, and the ones of ``shapes``.

Each trial runs as a process of its own with a time limit. It leaves its log in ``trials/NAME.log`` of the campaign's folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fineserve_calibrate.probes.engine_worker import ENVIRONMENT
from fineserve_calibrate.probes.parts import Row
from fineserve_calibrate.probes.schema import Unavailable

from fineserve_evidence.campaign.items import Trial
from fineserve_evidence.campaign.record import TRIALS

LIMIT_S, SHAPE_LIMIT_S = 420.0, 180.0
GRACE_S = 20.0
"""Seconds between asking a process to end and ending it by force."""
WEIGHTS = "*.safetensors"


def run_trial(trial: Trial, folder: Path, gpu: str | None) -> list[Row]:
    """Run a trial. Return rows ``trial, quantity, value`` (or ``text``). ``gpu`` is a catalog name, None for the CPU.

    Raises Unavailable when the trial fails, with the last line of its log.
    """
    out = folder / TRIALS
    out.mkdir(parents=True, exist_ok=True)
    rows = _TRIALS[trial.name](trial.model, out, gpu)
    return [{"trial": trial.name, **row} for row in rows]


def ended(command: Sequence[str], log: Path, limit_s: float = LIMIT_S, fine: Sequence[int] = (0,)) -> str:
    """Run a Python module to its end and return its stdout. Everything else goes into the log.

    Raises Unavailable when it fails or takes longer. Its process never outlives this call.
    """
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
        ) as process,
    ):
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{command[0]} took longer than {limit_s:g} s") from None
        finally:
            _end(process)
    if process.returncode not in fine:
        lines = [line.strip() for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
        raise Unavailable(f"{command[0]} ended with {process.returncode}: {lines[-1][:200] if lines else 'no word'}")
    return said


def _end(process: subprocess.Popen[str]) -> None:
    """As Ctrl-C does, so that it ends its own; by force when it does not."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _check(model: str, out: Path, gpu: str | None) -> list[Row]:
    said = ended(["fineserve_runtime", "check", "--json"], out / "check.log", 120.0, fine=(0, 1))
    return [{"quantity": each["what"], "text": f"{each['state']}: {each['found']}"} for each in json.loads(said)]


def _demo(model: str, out: Path, gpu: str | None) -> list[Row]:
    command = ["fineserve_evidence.campaign.trial_runs", "demo", "cuda" if gpu else "cpu"]
    said = ended(command, out / "demo.log").strip().splitlines()
    return [{"quantity": "said", "text": said[-1] if said else ""}]


def _overhead(model: str, out: Path, gpu: str | None) -> list[Row]:
    """Rows of ``trial_runs.overhead``."""
    with _weights(out / "overhead"):
        command = ["fineserve_evidence.campaign.trial_runs", "overhead", str(out / "overhead"), model, gpu or "cpu"]
        return _numbers(json.loads(ended(command, out / "overhead.log").strip().splitlines()[-1]))


def _replay(model: str, out: Path, gpu: str | None) -> list[Row]:
    """The summary's metrics; the results folder stays, for a simulation of the same file."""
    folder = out / "replay"
    with _weights(folder):
        ended(["fineserve_evidence.campaign.trial_runs", "files", str(folder), model, gpu or "cpu"], out / "files.log")
        command = ["fineserve_runtime", "replay", str(folder / "replay.yaml"), "--out", str(folder / "real"), "--json"]
        return _numbers(metrics(json.loads(ended(command, out / "replay.log"))))


def _shape(name: str, lacking: str = "") -> Callable[[str, Path, str | None], list[Row]]:
    """A trial of the part ``shapes``. ``lacking`` says what of it a CPU lacks."""

    def run(model: str, out: Path, gpu: str | None) -> list[Row]:
        if lacking and gpu is None:
            raise Unavailable(lacking)
        command = ["fineserve_evidence.campaign.shapes", name, model, "cuda" if gpu else "cpu"]
        return _numbers(json.loads(ended(command, out / f"{name}.log", SHAPE_LIMIT_S).strip().splitlines()[-1]))

    return run


@contextmanager
def _weights(folder: Path) -> Iterator[None]:
    """An empty folder. The weights of the models in it are removed at the end: gigabytes that can be drawn again."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield
    finally:
        for path in folder.rglob(WEIGHTS):
            path.unlink()


def metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Take the means of the metrics of a results folder's one cell, over all models."""
    (cell,) = summary["cells"]
    found = {name: values.get("mean") for name, values in cell["metrics"].items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def _numbers(found: Mapping[str, float]) -> list[Row]:
    return [{"quantity": name, "value": value} for name, value in found.items()]


_TRIALS: Mapping[str, Callable[[str, Path, str | None], list[Row]]] = {
    "check": _check,
    "demo": _demo,
    "replay": _replay,
    "overhead": _overhead,
    "ipc": _shape("ipc", "the CPU has no CUDA driver"),
    "handles": _shape("handles", "the CPU has no CUDA driver"),
    "nccl": _shape("nccl", "NCCL is NVIDIA's"),
    "gloo": _shape("gloo"),
    "graphs": _shape("graphs"),
    "asleep": _shape("asleep", "vLLM's engines sleep on GPUs alone"),
}
