"""Steps by what LLMServingSim's authors know of the machine of their runs: its link, and operators profiled on it.

So a test of TP groups and data-parallel ranks is not one of our tables. Times of one layer and GPU, in microseconds: linear
between measured points. All-reduces, and the exchange between ranks, go over the link of their cluster file.
"""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from fineserve_evidence.validate.predict import StepFactory

from fineserve_sim.catalog import Deployment, GpuSpec, ModelSpec, PrecisionSpec, data_ranks, expert_work
from fineserve_sim.latency import StepModel, measured_on
from fineserve_sim.latency.cost import Cost, Floats
from fineserve_sim.latency.operators import BYTES_16BIT, Adjusted
from fineserve_sim.latency.ranks import RanksStepModel, Sums

AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


def profiled(folder: Path, gpu: str, name: str, run: str) -> dict[str, pd.DataFrame]:
    """The tables of a model on one GPU, by name, and ``link``: seconds and bytes a second of the cluster of ``run``."""
    with tarfile.open(folder / "profiler_tables.tar.gz") as tables:
        root = f"profiler/perf/{gpu}/{name}/bf16/tp1"
        found = {}
        for table in ("dense", "attention", "per_sequence", "moe"):
            member = tables.extractfile(f"{root}/{table}.csv")
            assert member is not None
            found[table] = pd.read_csv(io.BytesIO(member.read()))
    launch_s, bytes_per_s = link_of(folder, run)
    found["link"] = pd.DataFrame({"s": [launch_s], "bytes_per_s": [bytes_per_s]})
    return found


def link_of(folder: Path, run: str) -> tuple[float, float]:
    """Seconds of a message, and bytes a second, of the cluster of ``run``."""
    cluster = json.loads((folder / f"{run}_config.json").read_text(encoding="utf-8"))
    return cluster["link_latency"] * 1e-9, cluster["link_bw"] * 1e9


@dataclass(frozen=True)
class _OverLink(Adjusted):
    """The operators of a TP group on another link: seconds of a message, and bytes a second."""

    model: ModelSpec
    tp: int
    link: tuple[float, float]

    def by_tokens(self, tokens: Floats) -> dict[str, Cost]:
        costs, (message_s, bytes_per_s) = self.plain.by_tokens(tokens), self.link
        ring_bytes = 2 * (self.tp - 1) / self.tp * tokens * self.model.hidden_size * BYTES_16BIT
        seconds = 2 * self.model.layers * (message_s + ring_bytes / bytes_per_s)
        return costs | {"all_reduce": costs["all_reduce"].with_seconds(seconds, costs["all_reduce"].source)}


def over_link(link: tuple[float, float], make_step: StepFactory, *engine: Any) -> StepModel:
    """The step model of a TP group whose all-reduces go over this link."""
    step = make_step(*engine)
    step._price_by(_OverLink(step.operators, step.model, step.tp, link), step.attention)
    return step


class ProfiledRanks(RanksStepModel):
    """Ranks on GPUs with these ``tables``. The catalog gives host times and everything else."""

    def __init__(
        self,
        tables: dict[str, pd.DataFrame],
        model: ModelSpec,
        precision: PrecisionSpec,
        tp: int,
        gpu: GpuSpec,
        deployment: Deployment,
    ) -> None:
        super().__init__(model, precision, tp, gpu, deployment, measured_on(gpu))
        work = expert_work(model, tp)
        assert work is not None
        self._dense = dict(iter(tables["dense"].groupby("layer")))
        self._sequences = dict(iter(tables["per_sequence"].groupby("layer")))
        self._experts = tables["moe"][tables["moe"].activated_experts == work.local]
        self._link_s, self._link_bytes_per_s = tables["link"].iloc[0].tolist()
        rows = tables["attention"]
        doubling = (rows[[*AXES]] & (rows[[*AXES]] - 1) == 0).all(axis=1)  # a finer grid beside it has holes
        rows = rows[doubling]
        self._axes = [np.unique(rows[axis]).astype(float) for axis in AXES]
        self._grid = np.full([len(axis) for axis in self._axes], np.nan)
        places = [np.searchsorted(axis, rows[name]) for axis, name in zip(self._axes, AXES, strict=True)]
        self._grid[tuple(places)] = rows.time_us
        self._attention_us = lru_cache(maxsize=1 << 18)(self._between)

    def _dense_us(self, name: str, tokens: int) -> float:
        return float(np.interp(tokens, self._dense[name].tokens, self._dense[name].time_us))

    def _between(self, *point: float) -> float:
        """Attention of a batch between the measured ones around it."""
        places, parts = [], []
        for axis, value in zip(self._axes, point, strict=True):
            place = int(np.clip(np.searchsorted(axis, value, side="right") - 1, 0, len(axis) - 2))
            places.append(place)
            parts.append((min(value, axis[-1]) - axis[place]) / (axis[place + 1] - axis[place]))
        total = weights = 0.0  # with decodes there is no row without context, nor one with it without decodes
        for corner in itertools.product((0, 1), repeat=len(AXES)):
            weight = float(np.prod([part if up else 1 - part for up, part in zip(corner, parts, strict=True)]))
            here = float(self._grid[tuple(place + up for place, up in zip(places, corner, strict=True))])
            if weight > 0 and not np.isnan(here):
                total, weights = total + weight * here, weights + weight
        return total / weights

    def group_s(self, batches: Sequence[Sums]) -> float:
        ranks, tokens = data_ranks(self.model), sum(batch[0] + batch[2] for batch in batches)
        message_bytes = tokens * self.model.hidden_size * 2 * (ranks - 1) / ranks
        exchange_us = 2e6 * (self._link_s + message_bytes / self._link_bytes_per_s)
        experts_us = float(np.interp(tokens / ranks, self._experts.tokens, self._experts.time_us))
        return max(self._own_s(exchange_us + experts_us, *batch) for batch in batches)

    def _own_s(
        self, shared_us: float, decodes: int, context: int, prefill: int, _: float, behind: int, sampled: int
    ) -> float:
        tokens = decodes + prefill
        layer_us = shared_us + 2 * self._dense_us("layernorm", tokens)
        layer_us += sum(self._dense_us(name, tokens) for name in ("qkv_proj", "qk_norm", "rotary_emb", "o_proj"))
        layer_us += self._attention_us(prefill, behind, decodes, context // decodes + 1 if decodes else 0)
        step_us = self.model.layers * layer_us
        step_us += self._dense_us("embedding", tokens) + self._dense_us("final_layernorm", tokens)
        for rows in self._sequences.values() if sampled else ():
            step_us += float(np.interp(sampled, rows.sequences, rows.time_us))
        return self.overhead_s + step_us * 1e-6
