"""The simulator's predictions of a campaign's measurements: steps of one engine, slowdowns of several, the runtime's replay.

``Predictor._paces`` is the only place that knows the simulator's law of sharing. ``slowdowns`` are read off the table
``sharing``. ``parity`` simulates the file that the runtime replayed, with the steps that the campaign measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fineserve_calibrate.probes.engines import Composition
from fineserve_calibrate.probes.schema import KEYS, LATENCY, ProbeError

from fineserve_evidence.campaign.items import Seat, parse_seat, seat_text
from fineserve_evidence.campaign.record import TRIALS
from fineserve_evidence.campaign.trials import metrics
from fineserve_sim.catalog import CatalogError, GpuSpec, deployment, model, precision
from fineserve_sim.latency import StepModel
from fineserve_sim.latency.sharing import mps, time_slice
from fineserve_sim.latency.tables import measured_on

PRECISION = {"bfloat16": "W16A16", "fp8": "W8A8KV8", "int4_wo": "W4A16"}
DEPLOYMENT = {"eager": "vllm-eager", "graphs": "vllm-cudagraph", "decode_graphs": "vllm-cudagraph"}
Active = tuple[Seat, Composition]


def work(load: Composition) -> tuple[int, int, int, float, int, int]:
    """Turn a load into the arguments of a step model: sums over its sequences."""
    new, cached = load.prefill_tokens, load.cached_tokens
    pairs = new * cached + new * (new + 1) / 2
    return load.decodes, load.decodes * load.context, new, pairs, cached, load.decodes + (new > 0)


class Predictor:
    """Predictions for one GPU and model. Raises CatalogError for a model that the catalog lacks."""

    def __init__(self, gpu: GpuSpec, model_name: str) -> None:
        self._gpu, self._model = gpu, model(model_name)
        self._step = cache(self._made)

    def _made(self, dtype: str, mode: str) -> StepModel:
        shape = (self._model, precision(PRECISION[dtype]), 1, self._gpu, deployment(DEPLOYMENT[mode]))
        return StepModel(*shape, tables=measured_on(self._gpu))

    def step_s(self, dtype: str, mode: str, load: Composition) -> float:
        """Predict the seconds of a step alone."""
        return self._step(dtype, mode).step_s(*work(load))

    def slowdown(self, sharing: str, mode: str, engines: Sequence[Active], place: int) -> float:
        """Predict the slowdown of the engine at ``place``: its step beside the others over its step alone under its cap."""
        return self._paces(sharing, mode, engines)[place] / self.capped(sharing, mode, engines[place])

    def capped(self, sharing: str, mode: str, engine: Active) -> float:
        """Predict the slowdown under a cap: the step alone under the engine's cap over the step on the whole device."""
        return self._paces(sharing, mode, [engine])[0]

    def _paces(self, sharing: str, mode: str, engines: Sequence[Active]) -> list[float]:
        """Step times beside each other over those alone on the whole device."""
        demands = []
        for seat, load in engines:
            need = self._step(seat.dtype, mode).demand(*work(load))
            demands.append(need._replace(sm_share=seat.percent / 100))
        return {"mps": mps, "time_slice": time_slice}[sharing](demands)


def predictor_of(gpu: GpuSpec | None, rows: Sequence[Mapping[str, Any]]) -> Predictor | None:
    """Make predictions for the rows' model; None where the catalog lacks the model or the device."""
    names = [row["model"] for row in rows if "model" in row]
    if gpu is None or not names:
        return None
    try:
        return Predictor(gpu, str(names[0]))
    except CatalogError:
        return None


Row = Mapping[str, Any]
ALONE = "none"


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Mean step time of an engine beside others, against the same engine alone under the same sharing and cap.

    ``predicted`` is None where the simulator does not know the device.
    """

    sharing: str
    mode: str
    engines: tuple[Active, ...]
    """The engines at work. The steps are those the first one ran."""
    alone_s: float
    shared_s: float
    predicted: float | None

    @property
    def measured(self) -> float:
        return self.shared_s / self.alone_s

    @property
    def error(self) -> float | None:
        """predicted / measured - 1."""
        return None if self.predicted is None else self.predicted / self.measured - 1

    @property
    def capped(self) -> bool:
        return any(seat.percent != 100 for seat, _ in self.engines)

    @property
    def phases(self) -> str:
        """Tell the engine's own phase, and how many of all engines prefill."""
        mine = "decode" if self.engines[0][1].decodes else "prefill"
        return f"{mine}, {sum(not load.decodes for _, load in self.engines)} of {len(self.engines)} prefill"

    @property
    def text(self) -> str:
        return " + ".join(seat_text(*engine) for engine in self.engines)


def own(row: Row) -> Active:
    """Read seat and load of the engine whose steps a row holds."""
    load = Composition(int(row["decodes"]), int(row["context"]), int(row["prefill_tokens"]))
    return Seat(str(row["dtype"]), int(row["percent"])), load


def others(row: Row) -> tuple[Active, ...]:
    """Read the engines beside it. Raises ValueError for a row whose names ``seat_text`` did not write."""
    names = [] if row["neighbours"] == ALONE else str(row["neighbours"]).split(" + ")
    return tuple((seat, load) for seat, load in map(parse_seat, names) if load)


def alone_s(rows: Sequence[Row]) -> dict[tuple[str, str, Active], float]:
    """Take the mean seconds of engines alone by (sharing, mode, seat and load): the median over their scenes."""
    found: dict[tuple[str, str, Active], list[float]] = {}
    for row in rows:
        if not others(row):
            found.setdefault((str(row["sharing"]), str(row["mode"]), own(row)), []).append(float(row["mean_s"]))
    return {key: median(seconds) for key, seconds in found.items()}


def slowdowns(rows: Sequence[Row], predictor: Predictor | None) -> list[Slowdown]:
    """Compute the slowdown of every row beside others whose engine was measured alone, too, under the same sharing and cap."""
    alone, found = alone_s(rows), list[Slowdown]()
    for row in rows:
        sharing, mode, engines = str(row["sharing"]), str(row["mode"]), (own(row), *others(row))
        if len(engines) > 1 and (sharing, mode, engines[0]) in alone:
            predicted = predictor.slowdown(sharing, mode, engines, 0) if predictor else None
            taken_s = alone[sharing, mode, engines[0]]
            found.append(Slowdown(sharing, mode, engines, taken_s, float(row["mean_s"]), predicted))
    return found


def caps(rows: Sequence[Row], predictor: Predictor | None) -> list[tuple[Active, str, float, float | None]]:
    """Compare engines alone under a part of the SMs with all SMs: (seat and load, mode, slowdown, predicted)."""
    alone, found = alone_s(rows), list[tuple[Active, str, float, float | None]]()
    for (sharing, mode, (seat, load)), seconds in alone.items():
        whole = alone.get((sharing, mode, (Seat(seat.dtype), load)))
        if seat.percent != 100 and whole:
            predicted = predictor.capped(sharing, mode, (seat, load)) if predictor else None
            found.append(((seat, load), mode, seconds / whole, predicted))
    return found


READ_AS = "eager"
"""An experiment's ``engine.step_times`` is read under this mode, also where another mode was measured."""
SIMULATE = "from fineserve_sim.cli import main; main()"
SHOWN = ("throughput_per_s", "ttft_p50_s", "tpot_p50_s", "ttft_mean_s", "tpot_mean_s", "ttft_attainment", "ttft_p99_s")


def parity(folder: Path, steps: Sequence[Row]) -> list[tuple[str, float, float]]:
    """Simulate the replay in a campaign's folder. Return (metric, real, simulated).

    The list is empty without a replay, or without steps of its engines. Raises ProbeError when the simulation fails.
    """
    replay = folder / TRIALS / "replay"
    real = replay / "real" / "summary.json"
    modes = {str(row["mode"]) for row in steps if row["dtype"] == "bfloat16"}
    if not real.exists() or not modes:
        return []
    mode = "graphs" if "graphs" in modes else READ_AS
    chosen = [row for row in steps if row["dtype"] == "bfloat16" and row["mode"] == mode]
    columns = {name: [row[name] for row in chosen] for name in (*KEYS["step"], LATENCY)}
    pq.write_table(pa.table(columns | {"mode": [READ_AS] * len(chosen)}), replay / "step.parquet")
    out = replay / "simulated"
    command = [sys.executable, "-c", SIMULATE, "run", str(replay / "replay.yaml"), "--out", str(out), "--jobs", "1"]
    run = subprocess.run(
        [*command, "--set", "engine.step_times=step.parquet"], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise ProbeError(" ".join(run.stderr.split()[-40:]) or f"the simulation ended with {run.returncode}")
    sides = [metrics(json.loads(path.read_text(encoding="utf-8"))) for path in (real, out / "summary.json")]
    return [(name, sides[0][name], sides[1][name]) for name in SHOWN if all(name in side for side in sides)]
