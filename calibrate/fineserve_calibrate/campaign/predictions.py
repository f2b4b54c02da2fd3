"""What the simulator says today of what a campaign measured: step times of one engine, and slowdowns of several.

``Predictor._paces`` is the only place that knows the simulator's law of sharing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from fineserve_calibrate.campaign.items import Seat
from fineserve_calibrate.probes.engines import Composition
from fineserve_sim.catalog import CatalogError, GpuSpec, deployment, model, precision
from fineserve_sim.latency import StepModel
from fineserve_sim.latency.sharing import mps, time_slice
from fineserve_sim.latency.tables import measured_on

PRECISION = {"bfloat16": "W16A16", "fp8": "W8A8KV8", "int4_wo": "W4A16"}
DEPLOYMENT = {"eager": "vllm-eager", "graphs": "vllm-cudagraph", "decode_graphs": "vllm-cudagraph"}
Active = tuple[Seat, Composition]


def work(load: Composition) -> tuple[int, int, int, float, int, int]:
    """A load as the arguments of a step model: its sums over sequences."""
    new, cached = load.prefill_tokens, load.cached_tokens
    pairs = new * cached + new * (new + 1) / 2
    return load.decodes, load.decodes * load.context, new, pairs, cached, load.decodes + (new > 0)


class Predictor:
    """Predictions for one GPU and model. Raises CatalogError for a model that the catalog does not have."""

    def __init__(self, gpu: GpuSpec, model_name: str) -> None:
        self._gpu, self._model = gpu, model(model_name)
        self._step = cache(self._made)

    def _made(self, dtype: str, mode: str) -> StepModel:
        shape = (self._model, precision(PRECISION[dtype]), 1, self._gpu, deployment(DEPLOYMENT[mode]))
        return StepModel(*shape, tables=measured_on(self._gpu))

    def step_s(self, dtype: str, mode: str, load: Composition) -> float:
        """Seconds of a step alone."""
        return self._step(dtype, mode).step_s(*work(load))

    def slowdown(self, sharing: str, mode: str, engines: Sequence[Active], place: int) -> float:
        """How many times longer a step of the engine at ``place`` takes beside the others than alone under its cap."""
        return self._paces(sharing, mode, engines)[place] / self.capped(sharing, mode, engines[place])

    def capped(self, sharing: str, mode: str, engine: Active) -> float:
        """How many times longer a step takes alone under the engine's cap than on the whole device."""
        return self._paces(sharing, mode, [engine])[0]

    def _paces(self, sharing: str, mode: str, engines: Sequence[Active]) -> list[float]:
        """Step times beside each other over those alone on the whole device."""
        demands = []
        for seat, load in engines:
            need = self._step(seat.dtype, mode).demand(*work(load))
            demands.append(need._replace(sm_share=seat.percent / 100))
        return {"mps": mps, "time_slice": time_slice}[sharing](demands)


def predictor_of(gpu: GpuSpec | None, rows: Sequence[Mapping[str, Any]]) -> Predictor | None:
    """For the model that the rows are of; None where the catalog does not have it, or the device."""
    names = [row["model"] for row in rows if "model" in row]
    if gpu is None or not names:
        return None
    try:
        return Predictor(gpu, str(names[0]))
    except CatalogError:
        return None
