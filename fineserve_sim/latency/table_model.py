"""Seconds of one engine step from measured tables; the same interface as ``StepModel``.

    step   = overhead + max(device, host floor)
    device = tokens[decodes + prefill_tokens] + lm_head[sampled] + attention
    attention = max(decode[decodes](context), floor if any prefill) + prefill

``tokens`` and ``lm_head`` are lists built from the tables, exact at each count. Decode attention is piecewise linear in the
summed context for each batch size. Prefill attention is that of prompts of equal length with as many keys per query,
2 * pairs / tokens - 1: exact for equal prompts without a prefix. A chunk after a cached prefix, which no table has, counts
as the part of such a prompt that its tokens are, and takes at least the time to read the prefix's KV (assumed). One kernel
serves decodes and prefills, so the floor is paid once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fineserve_sim.catalog import Deployment, GpuSpec, Kind, ModelSpec, PrecisionSpec, linears
from fineserve_sim.latency.operators import Floats, total
from fineserve_sim.latency.rates import Provenance, resolve
from fineserve_sim.latency.step import SCALAR_STEPS, StepModel
from fineserve_sim.latency.table_operators import TableOperators
from fineserve_sim.latency.tables import PiecewiseLinear, TableSet, shipped

INITIAL_ENTRIES = 512


class _Counts:
    """Seconds, and busy seconds, of 0, 1, 2, ... rows as plain lists, grown on demand; row 0 costs nothing."""

    __slots__ = ("_operators", "_sampled", "compute_s", "memory_s", "seconds")

    def __init__(self, operators: TableOperators, sampled: bool) -> None:
        self._operators, self._sampled = operators, sampled
        self.seconds: list[float] = [0.0]
        self.compute_s: list[float] = [0.0]
        self.memory_s: list[float] = [0.0]
        self.grow(INITIAL_ENTRIES)

    def grow(self, rows: int) -> None:
        """Extend the lists in place so that index ``rows`` exists."""
        first = len(self.seconds)
        counts = np.arange(first, max(rows, 2 * first) + 1, dtype=np.float64)
        costs = self._operators.by_sampled(counts) if self._sampled else self._operators.by_tokens(counts)
        seconds, compute_s, memory_s = total(costs)
        self.seconds += np.maximum.accumulate(
            np.maximum(seconds, self.seconds[-1])
        ).tolist()  # rounding must not make it fall
        self.compute_s += compute_s.tolist()
        self.memory_s += memory_s.tolist()


class TableStepModel(StepModel):
    """Step times of one engine by measured tables; arguments and results as for ``StepModel``.

    ``tables`` are those of the H100 that the simulator ships unless given. A GPU that they were not measured on keeps their
    ratio to its roofline.
    """

    def __init__(
        self,
        model: ModelSpec,
        precision: PrecisionSpec,
        tp: int,
        gpu: GpuSpec,
        deployment: Deployment,
        tables: TableSet | None = None,
    ) -> None:
        self.model, self.precision, self.tp, self.gpu, self.deployment = model, precision, tp, gpu, deployment
        self.tables = tables or shipped()
        self._ops = TableOperators(model, precision, tp, gpu, resolve(gpu, precision, tp), self.tables)
        self._by_tokens, self._by_sampled = _Counts(self._ops, sampled=False), _Counts(self._ops, sampled=True)
        self._tokens_s, self._sampled_s = self._by_tokens.seconds, self._by_sampled.seconds
        self._kv_s, self._pair_s = self._ops.rooflines.kv_s, self._ops.rooflines.pair_s
        self._curves: dict[int, PiecewiseLinear] = {}
        self._prefill = self._ops.prefill
        launch_s = self._ops.rates.attention.launch_s.value * model.layers
        self._prefill_floor_s = self._prefill.floor_s if self._prefill else launch_s
        floor = deployment.floor(precision.name)
        self._floor_s = floor.value if floor else 0.0
        self._overhead_s = deployment.overhead_s.value

    def _reserve(self, tokens: int, sampled: int) -> None:
        if tokens >= len(self._tokens_s):
            self._by_tokens.grow(tokens)
        if sampled >= len(self._sampled_s):
            self._by_sampled.grow(sampled)

    def _curve(self, decodes: int) -> PiecewiseLinear:
        curve = self._curves.get(decodes)
        if curve is None:
            curve = self._curves[decodes] = self._ops.decode_curve(decodes)
        return curve

    def _prefill_attention_s(self, tokens: int, pairs: float, context: int) -> float:
        """Attention seconds of a step's prompt chunks, the floor excluded."""
        table = self._prefill
        attend_s = table.beyond_floor_s(tokens, pairs) if table else pairs * self._pair_s
        read_s = (context + tokens) * self._kv_s
        return attend_s if attend_s > read_s else read_s

    def step_s(
        self,
        decodes: int,
        decode_context: int,
        prefill_tokens: int,
        prefill_pairs: float,
        prefill_context: int,
        sampled: int,
    ) -> float:
        """Seconds of one step."""
        tokens = decodes + prefill_tokens
        if tokens >= len(self._tokens_s) or sampled >= len(self._sampled_s):
            self._reserve(tokens, sampled)
        device = self._tokens_s[tokens] + self._sampled_s[sampled]
        attention = self._curve(decodes).at(decode_context + decodes) if decodes else 0.0
        if prefill_tokens:
            attention = max(attention, self._prefill_floor_s)
            attention += self._prefill_attention_s(prefill_tokens, prefill_pairs, prefill_context)
        device += attention
        return self._overhead_s + (device if device > self._floor_s else self._floor_s)

    def decode_steps_s(self, decodes: int, decode_context: int, steps: int) -> NDArray[np.float64]:
        """Seconds of each of ``steps`` consecutive decode-only steps, shape (steps,): step i equals
        ``step_s(decodes, decode_context + i * decodes, 0, 0, 0, decodes)`` bit for bit."""
        self._reserve(decodes, decodes)
        context = np.arange(1, steps + 1, dtype=np.int64) * decodes + decode_context
        device = (self._tokens_s[decodes] + self._sampled_s[decodes]) + self._curve(decodes).at_each(context)
        seconds: Floats = self._overhead_s + np.maximum(device, self._floor_s)
        return seconds

    def decode_ends_s(
        self, start_s: float, decodes: int, decode_context: int, steps: int, slowdown: float
    ) -> list[float]:
        """End times of consecutive decode-only steps from ``start_s``, each ``slowdown`` times as long as alone: the same
        bits as adding ``step_s(...) * slowdown`` one by one."""
        if steps > SCALAR_STEPS:
            return super().decode_ends_s(start_s, decodes, decode_context, steps, slowdown)
        self._reserve(decodes, decodes)
        batch_s = self._tokens_s[decodes] + self._sampled_s[decodes]
        attention_s, now, ends = self._curve(decodes).at, start_s, []
        for context in range(decode_context + decodes, decode_context + steps * decodes + 1, decodes):
            device = batch_s + attention_s(context)
            now += (self._overhead_s + (device if device > self._floor_s else self._floor_s)) * slowdown
            ends.append(now)
        return ends

    def shares(
        self,
        decodes: int,
        decode_context: int,
        prefill_tokens: int,
        prefill_pairs: float,
        prefill_context: int,
        sampled: int,
    ) -> tuple[float, float]:
        """Fractions in [0, 1] of the solo step during which it needs the compute units and the memory bandwidth
        (systems.md 1.3). Launches, host time and links count for neither; a kernel counts for both where they overlap.
        """
        step_s = self.step_s(decodes, decode_context, prefill_tokens, prefill_pairs, prefill_context, sampled)
        tokens = decodes + prefill_tokens
        decode_s = self._curve(decodes).at(decode_context + decodes) if decodes else 0.0
        prompt_s = self._prefill_attention_s(prefill_tokens, prefill_pairs, prefill_context) if prefill_tokens else 0.0
        compute_s = self._by_tokens.compute_s[tokens] + self._by_sampled.compute_s[sampled]
        compute_s += min(prefill_pairs * self._pair_s, prompt_s)
        memory_s = self._by_tokens.memory_s[tokens] + self._by_sampled.memory_s[sampled]
        memory_s += min((decode_context + decodes) * self._kv_s, decode_s)
        memory_s += min((prefill_context + prefill_tokens) * self._kv_s, prompt_s)
        return compute_s / step_s, memory_s / step_s

    def breakdown(
        self,
        decodes: int,
        decode_context: int,
        prefill_tokens: int,
        prefill_pairs: float,
        prefill_context: int,
        sampled: int,
    ) -> dict[str, float]:
        """Seconds by operator, summing to the step; ``host`` is what the host adds to the device's time."""
        tokens = decodes + prefill_tokens
        costs = self._ops.by_tokens(np.array([float(tokens)])) if tokens else {}
        costs |= self._ops.by_sampled(np.array([float(sampled)])) if sampled else {}
        parts = {name: float(cost.seconds[0]) for name, cost in costs.items()}
        decode_s = self._curve(decodes).at(decode_context + decodes) if decodes else 0.0
        parts["decode_attention"] = decode_s
        parts["prefill_attention"] = 0.0
        if prefill_tokens:
            attend_s = self._prefill_attention_s(prefill_tokens, prefill_pairs, prefill_context)
            parts["prefill_attention"] = max(self._prefill_floor_s - decode_s, 0.0) + attend_s
        step_s = self.step_s(decodes, decode_context, prefill_tokens, prefill_pairs, prefill_context, sampled)
        parts["host"] = step_s - sum(parts.values())
        return parts

    def kinds(
        self,
        decodes: int,
        decode_context: int,
        prefill_tokens: int,
        prefill_pairs: float,
        prefill_context: int,
        sampled: int,
    ) -> dict[str, Kind]:
        """Where each operator's seconds in ``breakdown`` come from. ``roofline``: outside the measured range, or
        measured on another GPU. Interpolation between measured points counts as measured."""
        ops, tokens = self._ops, decodes + prefill_tokens
        kernels = {name: getattr(ops.rates, name, None) for name in ops.rates.__dataclass_fields__}
        found: dict[str, Kind] = {name: kernel.bytes_per_s.kind for name, kernel in kernels.items() if kernel}
        if not ops.products:
            found |= self._roofline_kinds(tokens)
        found["qk_norm"] = ops.rates.norm.bytes_per_s.kind
        found |= {name: product.kind(tokens) for name, product in ops.products.items()}
        found["lm_head"] = ops.head.kind(sampled)
        if ops.all_reduce is not None:
            inside = tokens * self.model.hidden_size * 2 <= ops.all_reduce.counts[-1]
            found["all_reduce"] = "measured" if inside and not ops.scaled else "roofline"
        found["decode_attention"] = self._decode_kind(decodes, decode_context)
        found["prefill_attention"] = self._prefill_kind(prefill_tokens, prefill_pairs, prefill_context)
        floor = self.deployment.floor(self.precision.name)
        found["host"] = floor.kind if floor else self.deployment.overhead_s.kind
        return found

    def _roofline_kinds(self, tokens: int) -> dict[str, Kind]:
        """Where the matrix products of a format without tables come from: the rate that binds them."""
        rates = self._ops.rates.gemm
        costs = self._ops.rooflines.by_tokens(np.array([float(tokens)]))
        return {
            name: (rates.flops_per_s if costs[name].compute_s[0] > costs[name].memory_s[0] else rates.bytes_per_s).kind
            for name in linears(self.model, self.tp)
        }

    def _decode_kind(self, decodes: int, decode_context: int) -> Kind:
        decode = self._ops.decode
        if decode is None:
            return self._ops.rates.attention.bytes_per_s.kind
        if self._ops.scaled or (decodes and not decode.covers(decodes, decode_context / decodes + 1)):
            return "roofline"
        return "measured" if decode.exact else "assumed"

    def _prefill_kind(self, tokens: int, pairs: float, context: int) -> Kind:
        prefill = self._ops.prefill
        if prefill is None or context or not prefill.exact:
            return "assumed"
        outside = tokens and 2.0 * pairs / tokens - 1.0 > prefill.longest
        return "roofline" if outside or self._ops.scaled else "measured"

    def provenance_shares(
        self,
        decodes: int,
        decode_context: int,
        prefill_tokens: int,
        prefill_pairs: float,
        prefill_context: int,
        sampled: int,
    ) -> dict[Kind, float]:
        """Fractions of the step's seconds that are measured, fitted, roofline and assumed; they sum to 1."""
        batch = (decodes, decode_context, prefill_tokens, prefill_pairs, prefill_context, sampled)
        parts, kinds = self.breakdown(*batch), self.kinds(*batch)
        step_s = sum(parts.values())
        shares: dict[Kind, float] = {"measured": 0.0, "fitted": 0.0, "roofline": 0.0, "assumed": 0.0}
        for name, seconds in parts.items():
            shares[kinds[name]] += seconds / step_s
        return shares

    def provenance(self) -> list[Provenance]:
        """Every number behind these step times that is not in the tables, with its source, and every table."""
        lines = list(self._ops.rates.provenance())
        overhead = self.deployment.overhead_s
        lines.append(Provenance("host.overhead_s", overhead.value, "s", overhead.kind, overhead.source))
        floor = self.deployment.floor(self.precision.name)
        if floor:
            lines.append(Provenance("host.floor_s", floor.value, "s", floor.kind, floor.source))
        kind: Kind = "roofline" if self._ops.scaled else "measured"
        for name, grid in self.tables.grids.items():
            rows = float(np.isfinite(grid.latency_s).sum())
            lines.append(Provenance(f"table.{name}", rows, "rows", kind, self._source(name)))
        return lines

    def _source(self, name: str) -> str:
        operator, variant = name.split("/")[:2]
        key = f"{operator}/{variant if variant == 'int4_wo' else 'all'}"
        return ", ".join(self.tables.fingerprint[f"{key} {what}"] for what in ("source", "backend", "licence"))
