"""Step times of a real engine as a step model of the simulator.

    step      = tokens[decodes + prefill_tokens] + sampled * row_s + decode context * kv_s + attention of the chunks
    attention = max(pairs * pair_s, keys * kv_s)

This is the structure of ``StepModel``: the same interface, the same arithmetic, other numbers. ``tokens`` is a non-decreasing
piecewise linear curve. The unknowns are the curve at the measured token counts, row_s, kv_s and pair_s. They are non-negative
and have the least absolute relative errors over all measured steps. The fit is by least squares, with weights from the errors
of the round before, so a step that was disturbed does not bend the curve.

A table may have steps that came after another engine's (column ``in_turn``). Those take longer, since caches must be filled
again with code and weights, with what the engine keeps of each sequence, and with keys and values:

    turn_s + sampled * turn_row_s + decode context * turn_kv_s

A table may also have steps of pipelines (column ``stages``). A stage computes its part of the layers, and its host works as
long as for all of them. So all stages of a batch take ``step + (stages - 1) * host_s``, which such a row has as its seconds.

A step keeps its device busy to the part ``share``: 1 where engines take turns, less where each has cores of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.optimize import nnls

from fineserve_sim.catalog import Deployment, GpuSpec, ModelSpec, PrecisionSpec, Quantity
from fineserve_sim.latency.cost import EXTRAPOLATED, FITTED, Cost
from fineserve_sim.latency.rates import Provenance
from fineserve_sim.latency.sharing import Demand
from fineserve_sim.latency.step import StepModel
from fineserve_sim.latency.table_operators import GEMM_DTYPE
from fineserve_sim.latency.tables import PiecewiseLinear, TableError

Floats = NDArray[np.float64]
COLUMNS = ("model", "dtype", "mode", "decodes", "context", "prefill_tokens", "cached_tokens", "latency_s")
IN_TURN, STAGES = "in_turn", "stages"
"""Columns that tables without a second engine, or without a pipeline, do not have."""

ROUNDS = 20
NOISE = 0.02  # relative error below which rows weigh alike
OWN = 0.5
"""At least so much of the quickest row is in every step. Without this, noise can make a turn explain whole steps."""


class TurnFit(NamedTuple):
    """Seconds that a turn of another engine adds to a step, to each sequence that gets a token in it, and to each cached token
    of its decodes."""

    turn_s: float
    row_s: float
    kv_s: float

    def added_s(self, decode_context: int, sampled: int) -> float:
        return self.turn_s + sampled * self.row_s + decode_context * self.kv_s


@dataclass(frozen=True, slots=True)
class StepFit:
    """Seconds at token counts (``counts``), of a sequence that gets a token, of a cached decode token, and of a query-key
    pair. A step after another engine's takes ``turn`` more. Each stage of a pipeline has ``host_s`` to itself.

    ``error`` holds fitted / measured - 1 of each row.
    """

    counts: Floats
    seconds: Floats
    row_s: float
    kv_s: float
    pair_s: float
    error: Floats
    turn: TurnFit
    host_s: float = 0.0


def read_steps(path: Path, model: str, dtype: str, mode: str) -> dict[str, Any]:
    """Columns of the rows of one engine in a ``step.parquet``.

    Raises TableError for another file, or when it has no such rows.
    """
    try:
        data = pq.read_table(path)
    except (OSError, ValueError) as error:
        raise TableError(
            f"{path.name}: not a Parquet file; expected the step.parquet of fineserve-calibrate"
        ) from error
    missing = [name for name in COLUMNS if name not in data.column_names]
    if missing:
        raise TableError(f"{path.name}: no column {', '.join(missing)}; expected {', '.join(COLUMNS)}")
    there = [*COLUMNS, *({IN_TURN, STAGES} & set(data.column_names))]
    columns = {name: data[name].to_numpy(zero_copy_only=False) for name in there}
    keep = (columns["model"] == model) & (columns["dtype"] == dtype) & (columns["mode"] == mode)
    if not keep.any():
        engines = zip(*(columns[name].tolist() for name in ("model", "dtype", "mode")), strict=True)
        known = ", ".join(" ".join(engine) for engine in dict.fromkeys(engines))
        raise TableError(f"{path.name}: no steps of {model} {dtype} {mode}; it has {known}")
    return {name: values[keep] for name, values in columns.items()}


def _hats(tokens: Floats, counts: Floats) -> Floats:
    """Weights of the increments between counts: the curve at ``tokens`` is their product with increments >= 0."""
    lengths = np.diff(counts, prepend=0.0)
    starts = counts - lengths
    inside = (tokens[:, None] - starts[None, :]) / np.where(lengths > 0, lengths, 1.0)
    hats: Floats = np.clip(inside, 0.0, 1.0)
    return hats


def fit_steps(columns: dict[str, Any]) -> StepFit:
    """Fit measured steps, columns as ``read_steps`` gives them.

    Raises TableError with too few rows: fewer than three token counts, or no more rows than unknowns.
    """
    decodes, context, new, prefix = (
        columns[name].astype(np.float64) for name in ("decodes", "context", "prefill_tokens", "cached_tokens")
    )
    seconds: Floats = columns["latency_s"].astype(np.float64)
    counts = np.unique(decodes + new)
    if len(counts) < 3 or len(seconds) <= len(counts) + 3:
        raise TableError(f"step: {len(seconds)} rows over {len(counts)} token counts are too few for a step model")
    pairs, keys, decode_keys = new * prefix + new * (new + 1) / 2, prefix + new, decodes * (context + 1)
    hats, sampled = _hats(decodes + new, counts), decodes + (new > 0)
    turned = np.asarray(columns.get(IN_TURN, np.zeros(len(seconds))), dtype=np.float64)
    stages = np.asarray(columns.get(STAGES, np.ones(len(seconds))), dtype=np.float64)
    turns = np.column_stack([turned, turned * sampled, turned * decode_keys, stages - 1])
    by_keys, weight = np.zeros(len(seconds), dtype=bool), np.ones(len(seconds))
    for _ in range(ROUNDS):
        kv = decode_keys + np.where(by_keys, keys, 0.0)
        features = np.column_stack([hats, sampled, kv, np.where(by_keys, 0.0, pairs), turns])
        found = _relative(features, seconds, weight)
        curve, (row_s, kv_s, pair_s), turn = found[:-7], found[-7:-4].tolist(), found[-4:]
        by_keys = keys * kv_s > pairs * pair_s
        chunks_s = np.maximum(pairs * pair_s, keys * kv_s)
        error = (hats @ curve + sampled * row_s + decode_keys * kv_s + chunks_s + turns @ turn) / seconds - 1
        weight = 1 / np.sqrt(np.maximum(np.abs(error), NOISE))
    *turn_s, host_s = turn.tolist()
    return StepFit(counts, np.cumsum(curve), row_s, kv_s, pair_s, error, TurnFit(*turn_s), host_s)


def _relative(features: Floats, seconds: Floats, weight: Floats) -> Floats:
    """Non-negative parameters with the least weighted squares of the relative errors. The first is in every step, and at
    least ``OWN`` of the quickest. The problem is convex, so where that bound binds it is met exactly."""
    rows = features * (weight / seconds)[:, None]
    scale = np.maximum(rows.max(axis=0), np.finfo(np.float64).tiny)
    found: Floats = nnls(rows / scale, weight)[0] / scale
    own_s = OWN * seconds.min()
    if found[0] < own_s:
        rest = nnls((rows / scale)[:, 1:], weight * (1 - own_s / seconds))[0] / scale[1:]
        found = np.concatenate([[own_s], rest])
    return found


@dataclass(frozen=True, slots=True)
class MeasuredAttention:
    """Attention as fitted; see ``fineserve_sim.latency.attention.Attention``. Launches are in the curve over tokens."""

    pair_s: float
    kv_s: float
    floor_s: float = 0.0

    def decode(self, decodes: int) -> PiecewiseLinear:
        """Seconds against the summed context, new tokens included."""
        return PiecewiseLinear([0.0], [0.0], self.kv_s)

    def prefill_s(self, tokens: int, pairs: float, context: int) -> float:
        """Seconds of prompt chunks: pairs, or reading their keys."""
        return max(pairs * self.pair_s, (context + tokens) * self.kv_s)

    def beside_prompts_s(self, decodes: int, tokens: int) -> float:
        """None: the fit takes a step's parts as a sum."""
        return 0.0

    def decode_source(self, decodes: int, context: int) -> int:
        """Fitted."""
        return FITTED

    def prefill_source(self, tokens: int, pairs: float, context: int) -> int:
        """Fitted."""
        return FITTED


@dataclass(frozen=True, slots=True)
class MeasuredOperators:
    """The whole step in place of its operators: what depends on tokens, and attention."""

    fit: StepFit
    source: str

    def by_tokens(self, tokens: Floats) -> dict[str, Cost]:
        """The fitted curve; beyond the largest measured count with its last slope."""
        counts, seconds = self.fit.counts, self.fit.seconds
        slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
        curve_s = np.interp(tokens, counts, seconds) + np.maximum(tokens - counts[-1], 0.0) * slope
        source = np.where(tokens > counts[-1], EXTRAPOLATED, FITTED)
        return {"tokens": Cost(curve_s, curve_s, curve_s, source)}

    def by_sampled(self, rows: Floats) -> dict[str, Cost]:
        """Seconds that each sequence with a sampled token adds."""
        rows_s = rows * self.fit.row_s
        return {"lm_head": Cost(rows_s, rows_s, rows_s, np.full(rows.shape, FITTED))}

    @property
    def attention(self) -> MeasuredAttention:
        """Attention of a batch."""
        return MeasuredAttention(self.fit.pair_s, self.fit.kv_s)

    def provenance(self) -> list[Provenance]:
        """The fitted numbers, and how well they fit."""
        error = float(np.median(np.abs(self.fit.error)))
        where = f"{self.source}, fitted over {len(self.fit.error)} steps, median error {error:.1%}"
        fit = self.fit
        numbers = {"least_s": fit.seconds[0], "row_s": fit.row_s, "kv_s": fit.kv_s, "pair_s": fit.pair_s}
        turn = fit.turn
        numbers |= {"turn_s": turn.turn_s, "turn_row_s": turn.row_s, "turn_kv_s": turn.kv_s} if any(turn) else {}
        numbers |= {"host_s": fit.host_s} if fit.host_s else {}
        return [Provenance(f"step.{name}", float(value), "s", "fitted", where) for name, value in numbers.items()]


class MeasuredStepModel(StepModel):
    """Step times of a real engine; methods and results as for ``StepModel``. The measured steps hold the host's time already.

    ``source`` says where they were measured, ``share`` is the part of its device that a step keeps busy.
    """

    def __init__(
        self, model: ModelSpec, precision: PrecisionSpec, gpu: GpuSpec, fit: StepFit, source: str, share: float = 1.0
    ) -> None:
        nothing = Quantity(value=0.0, kind="measured", source="inside the measured steps")
        self.model, self.precision, self.tp, self.gpu = model, precision, 1, gpu
        self.deployment = Deployment(name="measured steps", overhead_s=nothing)
        self.fit, self.share, self.factor = fit, share, 1.0
        operators = MeasuredOperators(fit, source)
        self._price_by(operators, operators.attention)

    @property
    def stage_host_s(self) -> float:
        """As fitted to steps of pipelines; without any, 0."""
        return self.factor * self.fit.host_s

    def slow_down(self, factor: float) -> None:
        """As for ``StepModel``; a turn of another engine costs as much more."""
        super().slow_down(factor)
        self.factor *= factor

    def demand(
        self,
        decodes: int,
        decode_context: int,
        prefill_tokens: int,
        prefill_pairs: float,
        prefill_context: int,
        sampled: int,
        step_s: float | None = None,
    ) -> Demand:
        """Fractions of its device that a step needs. A measured engine does not tell its bound, so all are alike."""
        if step_s is None:
            chunks = (prefill_tokens, prefill_pairs, prefill_context)
            step_s = self.step_s(decodes, decode_context, *chunks, sampled)
        turn_s = self.factor * self.fit.turn.added_s(decode_context, sampled)
        return Demand(self.share, self.share, self.share, step_s=step_s, turn_s=turn_s)


def check_steps(
    path: Path, model: ModelSpec, precision: PrecisionSpec, mode: str = "eager"
) -> tuple[dict[str, Any], str]:
    """The measured steps of a model, as ``read_steps`` gives them, and their dtype. TableError as of ``load_step_model``."""
    dtype = GEMM_DTYPE.get((precision.weight_bits, precision.activation_bits))
    if dtype is None:
        raise TableError(f"{path.name}: no steps in {precision.name}; probes run bfloat16, fp8 and 4-bit weights")
    return read_steps(path, model.name, dtype, mode), dtype


def load_step_model(
    path: Path, model: ModelSpec, precision: PrecisionSpec, gpu: GpuSpec, mode: str = "eager", share: float = 1.0
) -> MeasuredStepModel:
    """The step model of an engine whose steps ``fineserve-calibrate --gpu ... [--model ...]`` measured at TP 1.

    Raises TableError for another file, a precision that is not probed, or one without rows.
    """
    columns, dtype = check_steps(path, model, precision, mode)
    fit = fit_steps(columns)
    return MeasuredStepModel(model, precision, gpu, fit, f"{path.name}: {model.name} {dtype} {mode}", share)
