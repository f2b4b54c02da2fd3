"""Seconds of one engine step from a few running sums of its batch.

    step   = overhead + sampled * sequence + max(device, host floor)     and on a TP group more for a step with prompts
    device = tokens[decodes + prefill_tokens] + lm_head[sampled] + attention

Operator costs come from measured tables, or from rooflines where there are none (``table_operators``, ``operators``). Costs
that depend on a count alone are lists, filled at each count from 0 on, so that a lookup is an index.

Decode attention of a batch is piecewise linear in its context (``attention``). Invariant: ``decode_ends_s`` walks along the
pieces and does the same IEEE operations in the same order as ``step_s``. So both agree bit for bit, and merged steps end when
single ones would.

Host time belongs to the deployment: CUDA graphs leave an overhead, eager engines a floor as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fineserve_sim.catalog import (
    AttentionVariant,
    Deployment,
    GpuSpec,
    ModelSpec,
    PrecisionSpec,
    data_ranks,
    expert_work,
)
from fineserve_sim.latency.attention import TILE_ROWS, Attention, Tail, Tiles
from fineserve_sim.latency.cost import Cost, Floats
from fineserve_sim.latency.experts import LEAST_ALIGNED_OUTPUTS
from fineserve_sim.latency.legacy import LegacyAttention
from fineserve_sim.latency.operators import BITS_8, AlignedExperts, FusedQuantisation, OperatorCosts, Operators
from fineserve_sim.latency.rates import Provenance, compiled, resolve
from fineserve_sim.latency.sharing import Demand
from fineserve_sim.latency.slower import Offloaded, Slowed, SlowedAttention
from fineserve_sim.latency.table_operators import TableOperators
from fineserve_sim.latency.tables import PiecewiseLinear, TableSet
from fineserve_sim.policy.interfaces import prompt_pairs

INITIAL_ENTRIES: Final = 512
SCALAR_STEPS: Final = 96  # up to there, a loop is faster than numpy's fixed cost


class Counts:
    """Seconds, and busy seconds, of 0, 1, 2, ... rows as plain lists, grown on demand; row 0 costs nothing."""

    __slots__ = ("_costs", "compute_s", "memory_s", "seconds")

    def __init__(self, costs: Callable[[Floats], dict[str, Cost]]) -> None:
        self._costs = costs
        self.seconds: list[float] = [0.0]
        self.compute_s: list[float] = [0.0]
        self.memory_s: list[float] = [0.0]
        self.grow(INITIAL_ENTRIES)

    def at(self, rows: int) -> float:
        """Seconds of so many rows."""
        if rows >= len(self.seconds):
            self.grow(rows)
        return self.seconds[rows]

    def grow(self, rows: int) -> None:
        """Extend the lists in place so that index ``rows`` exists."""
        first = len(self.seconds)
        counts = np.arange(first, max(rows, 2 * first) + 1, dtype=np.float64)
        costs = self._costs(counts)
        seconds = np.maximum(_sum(costs, "seconds"), self.seconds[-1])
        self.seconds += np.maximum.accumulate(seconds).tolist()  # rounding must not make it fall
        self.compute_s += _sum(costs, "compute_s").tolist()
        self.memory_s += _sum(costs, "memory_s").tolist()


def _sum(costs: dict[str, Cost], what: str) -> Floats:
    """Over operators, one after the other."""
    first, *others = (getattr(cost, what) for cost in costs.values())
    total: Floats = sum(others, first)
    return total


def _ends_of(start_s: float, each_s: Floats, slowdown: float) -> list[float]:
    """End times of consecutive steps that take ``each_s`` alone."""
    times = np.empty(len(each_s) + 1)
    times[0] = start_s
    np.multiply(each_s, slowdown, out=times[1:])
    ends: list[float] = times.cumsum()[1:].tolist()  # cumsum adds one by one, in order
    return ends


class StepModel:
    """Step times of one engine: a model in a precision on a TP group of one GPU type, run by a deployment.

    ``tables``: measured operators; a GPU that they were not measured on keeps their ratio to its roofline. None: rooflines.
    ``kernel``: another attention kernel than today's.

    Methods take the running sums of a batch as ``Batch`` explains them; results are seconds without contention.

    Raises ValueError when the model does not split over ``tp``, the GPU cannot compute in the precision, or no rate or
    host floor is known for it.
    """

    def __init__(
        self,
        model: ModelSpec,
        precision: PrecisionSpec,
        tp: int,
        gpu: GpuSpec,
        deployment: Deployment,
        tables: TableSet | None = None,
        kernel: AttentionVariant | None = None,
    ) -> None:
        precision = precision.on(gpu)
        self.model, self.precision, self.tp, self.gpu, self.deployment = model, precision, tp, gpu, deployment
        rates = resolve(gpu, precision, tp, model.experts is not None)
        rates = compiled(rates, gpu) if deployment.fuses_elementwise else rates
        engine = (model, precision, tp, gpu, rates)
        operators: OperatorCosts = Operators(*engine) if tables is None else TableOperators(*engine, tables)
        fused = deployment.fused_quantisation_s
        if fused and precision.activation_bits == BITS_8:
            operators = FusedQuantisation(operators, fused.value, model.layers)
        work, rows_each = expert_work(model, tp), deployment.aligned_expert_rows
        if work and rows_each and precision.activation_bits == BITS_8 and 2 * work.width > LEAST_ALIGNED_OUTPUTS:
            operators = AlignedExperts(operators, work, rates.gemm, rows_each, data_ranks(model))
        plain = operators.attention
        self._price_by(operators, LegacyAttention(plain, kernel, model.q_heads / model.kv_heads) if kernel else plain)

    def _price_by(self, operators: OperatorCosts, attention: Attention) -> None:
        """Take all costs from here, and the host's from the deployment."""
        self.operators, self.attention = operators, attention
        self._tokens, self._sampled = Counts(operators.by_tokens), Counts(operators.by_sampled)
        self._tokens_s, self._sampled_s = self._tokens.seconds, self._sampled.seconds
        self._prefill_s, self._attention_floor_s = attention.prefill_s, attention.floor_s
        self._kv_s, self._pair_s = attention.kv_s, attention.pair_s
        self._beside_s = attention.beside_prompts_s if self.model.linear else None
        plain = self.model.linear is None and self.model.latent is None
        tiling_sms = self.gpu.tiling_sms if plain and self.deployment.one_attention_kernel else None
        self._tiles = Tiles(self.model, self.tp, tiling_sms) if tiling_sms else None
        self._decode_curves: dict[int, PiecewiseLinear] = {}
        host = self.deployment
        floor = host.floor(self.precision.name, self.model.layers, self.tp)
        self.floor_s = floor.value if floor else 0.0
        self.overhead_s, self.prompt_s = host.overhead(self.tp), host.prompt(self.tp)
        self.sequence_s = host.sequence_s.value if host.sequence_s else 0.0

    @property
    def tail(self) -> Tail | None:
        """How the longest of uneven sequences delays a step; None where it does not."""
        return self._tiles.tail if self._tiles else None

    @property
    def stage_host_s(self) -> float:
        """Host seconds that each stage of a pipeline has to itself, for any number of layers."""
        return self.overhead_s

    def slow_down(self, factor: float) -> None:
        """Make every step ``factor`` times as long, the host's time included; before the first step is asked for."""
        self._price_by(Slowed(self.operators, factor), SlowedAttention(self.attention, factor))
        self.floor_s, self.sequence_s = factor * self.floor_s, factor * self.sequence_s
        self.overhead_s, self.prompt_s = factor * self.overhead_s, factor * self.prompt_s
        if self._tiles is not None:
            self._tiles.idle_s *= factor

    def copy_tokens(self, token_s: float) -> None:
        """Make every token of a step take ``token_s`` more, for the copy of its KV; before the first step is asked for."""
        self._price_by(Offloaded(self.operators, token_s), self.attention)

    def _reserve(self, tokens: int, sampled: int) -> None:
        if tokens >= len(self._tokens_s):
            self._tokens.grow(tokens)
        if sampled >= len(self._sampled_s):
            self._sampled.grow(sampled)

    def _decode_curve(self, decodes: int) -> PiecewiseLinear:
        """Attention of ``decodes`` (> 0) decoding sequences against their context, new tokens included."""
        curve = self._decode_curves.get(decodes)
        if curve is None:
            curve = self._decode_curves[decodes] = self.attention.decode(decodes)
        return curve

    def attention_s(
        self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: float, prefill_context: int
    ) -> tuple[float, float]:
        """Attention seconds of the decodes alone, and what prompt chunks add beyond them and beyond the floor."""
        decode_s = self._decode_curve(decodes).at(decode_context + decodes) if decodes else 0.0
        if not prefill_tokens:
            return decode_s, 0.0
        prefill_s = self._prefill_s(prefill_tokens, prefill_pairs, prefill_context)
        if decodes and self._beside_s is not None:
            prefill_s += self._beside_s(decodes, prefill_tokens)
        if self._tiles is not None and decodes:
            decode_s = max(decode_s, self._tiled_s(decodes, decode_context + decodes, prefill_tokens))
        return decode_s, prefill_s

    def _tiled_s(self, decodes: int, context: int, prefill_tokens: int) -> float:
        """Decodes (> 0) with so many keys in all, as tiles of the kernel of prompt chunks (> 0 tokens); 0 without tiles."""
        if self._tiles is None:
            return 0.0
        idle_s = decodes * ((prefill_tokens - 1) // TILE_ROWS) * self._tiles.idle_s
        return self._prefill_s(TILE_ROWS * decodes, TILE_ROWS * context, 0) + idle_s

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
        attention_s, host_s = 0.0, self.overhead_s + sampled * self.sequence_s
        if decodes:
            curve = self._decode_curves.get(decodes) or self._decode_curve(decodes)
            attention_s = curve.at(decode_context + decodes)
        if prefill_tokens:
            if self._tiles is not None and decodes:
                attention_s = max(attention_s, self._tiled_s(decodes, decode_context + decodes, prefill_tokens))
            attention_s = max(attention_s, self._attention_floor_s)
            attention_s += self._prefill_s(prefill_tokens, prefill_pairs, prefill_context)
            if decodes and self._beside_s is not None:
                attention_s += self._beside_s(decodes, prefill_tokens)
            host_s += self.prompt_s
        device_s = self._tokens_s[tokens] + self._sampled_s[sampled] + attention_s
        return host_s + (device_s if device_s > self.floor_s else self.floor_s)

    def decode_steps_s(self, decodes: int, decode_context: int, steps: int) -> NDArray[np.float64]:
        """Seconds of each of ``steps`` consecutive decode-only steps, shape (steps,): step i equals
        ``step_s(decodes, decode_context + i * decodes, 0, 0, 0, decodes)`` bit for bit."""
        self._reserve(decodes, decodes)
        context = np.arange(1, steps + 1, dtype=np.int64) * decodes + decode_context
        device_s = (self._tokens_s[decodes] + self._sampled_s[decodes]) + self._decode_curve(decodes).at_each(context)
        seconds: Floats = (self.overhead_s + decodes * self.sequence_s) + np.maximum(device_s, self.floor_s)
        return seconds

    def _decode_costs(self, decodes: int) -> tuple[float, float, PiecewiseLinear]:
        """Of a step in which all decode: device seconds apart from attention, host seconds, attention."""
        if decodes >= len(self._tokens_s) or decodes >= len(self._sampled_s):
            self._reserve(decodes, decodes)
        batch_s = self._tokens_s[decodes] + self._sampled_s[decodes]
        host_s = self.overhead_s + decodes * self.sequence_s
        return batch_s, host_s, self._decode_curves.get(decodes) or self._decode_curve(decodes)

    def decode_span_s(
        self, start_s: float, decodes: int, decode_context: int, steps: int, slowdown: float
    ) -> tuple[list[float], list[float]]:
        """``decode_ends_s``, and what each step takes alone, for an engine whose slowdown may change."""
        if steps > SCALAR_STEPS:
            each_s = self.decode_steps_s(decodes, decode_context, steps)
            return _ends_of(start_s, each_s, slowdown), each_s.tolist()
        batch_s, host_s, curve = self._decode_costs(decodes)
        context, end = decode_context + decodes, decode_context + steps * decodes + 1
        alone_s: list[float] = []
        while context < end:
            piece_start, value, slope, next_piece = curve.piece(context)
            stop = end if end <= next_piece else math.ceil(next_piece)
            alone_s += [
                host_s + (batch_s + (value + (keys - piece_start) * slope)) for keys in range(context, stop, decodes)
            ]
            context += -((context - stop) // decodes) * decodes
        if self.floor_s:
            least_s = host_s + self.floor_s
            alone_s = [step_s if step_s > least_s else least_s for step_s in alone_s]
        now = start_s
        return [now := now + step_s * slowdown for step_s in alone_s], alone_s

    def decode_ends_s(
        self,
        start_s: float,
        decodes: int,
        decode_context: int,
        steps: int,
        slowdown: float,
        until_s: float = math.inf,
    ) -> list[float]:
        """End times of consecutive decode-only steps from ``start_s``, each ``slowdown`` times as long as alone: the same
        bits as adding ``step_s(...) * slowdown`` one by one. Those after the first beyond ``until_s`` may be left out."""
        if steps > SCALAR_STEPS and until_s < math.inf:
            least_s = self.step_s(decodes, decode_context, 0, 0, 0, decodes) * slowdown  # later steps take no less
            steps = min(steps, int((until_s - start_s) / least_s) + 2)
        if steps > SCALAR_STEPS:
            return _ends_of(start_s, self.decode_steps_s(decodes, decode_context, steps), slowdown)
        batch_s, host_s, curve = self._decode_costs(decodes)
        now, ends, floor_s, next_piece = start_s, [], self.floor_s, 0.0
        for context in range(decode_context + decodes, decode_context + steps * decodes + 1, decodes):
            if context >= next_piece:
                piece_start, value, slope, next_piece = curve.piece(context)
            device_s = batch_s + (value + (context - piece_start) * slope)
            now += (host_s + (device_s if device_s > floor_s else floor_s)) * slowdown
            ends.append(now)
            if now > until_s:
                break
        return ends

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
        """Needs of the step as fractions in [0, 1] of its time alone.

        They are the time in which compute units are busy, in which memory bandwidth is, and in which a kernel is on the
        device. A kernel counts for both units and bandwidth where they overlap; launches, host time and links for neither.
        The step lasts ``step_s``, by default what ``step_s()`` says.
        """
        tokens = decodes + prefill_tokens
        device_s, compute_s, memory_s = self.device(  # compiled, a call with *batch is slow
            decodes, decode_context, prefill_tokens, prefill_pairs, prefill_context, tokens, sampled
        )
        if step_s is None:
            host_s = self.overhead_s + sampled * self.sequence_s
            if prefill_tokens:
                host_s += self.prompt_s
            step_s = host_s + max(device_s, self.floor_s)
        return Demand(compute_s / step_s, memory_s / step_s, min(1.0, device_s / step_s), 1.0, step_s)

    def device(
        self,
        decodes: int,
        decode_context: int,
        prefill_tokens: int,
        prefill_pairs: float,
        prefill_context: int,
        tokens: int,
        logits: int,
    ) -> tuple[float, float, float]:
        """Seconds of one pass on the device, and how many of them keep compute units and bandwidth busy.

        ``tokens`` of decodes and of chunks pass through the layers, and ``logits`` rows through the lm_head.
        """
        if tokens >= len(self._tokens_s) or logits >= len(self._sampled_s):
            self._reserve(tokens, logits)
        context = decode_context + tokens - prefill_tokens
        decode_s = self._decode_curve(decodes).at(context) if decodes else 0.0
        prefill_s = self._prefill_s(prefill_tokens, prefill_pairs, prefill_context) if prefill_tokens else 0.0
        attention_s = decode_s
        if prefill_tokens:
            tiled_s = self._tiled_s(decodes, context, prefill_tokens) if decodes else 0.0
            attention_s = max(decode_s, self._attention_floor_s, tiled_s) + prefill_s
        if decodes and prefill_tokens and self._beside_s is not None:
            attention_s += self._beside_s(decodes, prefill_tokens)
        compute_s = self._tokens.compute_s[tokens] + self._sampled.compute_s[logits]
        compute_s += min(prefill_pairs * self._pair_s, prefill_s)
        memory_s = self._tokens.memory_s[tokens] + self._sampled.memory_s[logits]
        memory_s += min(context * self._kv_s, decode_s)
        memory_s += min((prefill_context + prefill_tokens) * self._kv_s, prefill_s)
        return self._tokens_s[tokens] + self._sampled_s[logits] + attention_s, compute_s, memory_s

    def prefill_s(self, tokens: int, decoding: int, budget: int, pairs: int | None = None) -> float:
        """Predicted seconds to prefill prompts with ``tokens`` tokens and ``pairs`` query-key pairs in all, by default one
        prompt, in chunks of ``budget - decoding``.

        Non-decreasing in prompts and in their lengths; infinite when the decodes leave nothing. A scheduler's estimate from
        sums: a chunk is of one prompt, behind as long a prefix as the mean of all; the decodes' own contexts are not charged.
        """
        if tokens <= 0:
            return 0.0
        chunk = budget - decoding
        if chunk <= 0:
            return math.inf
        pairs = prompt_pairs(tokens) if pairs is None else pairs
        full, last = (tokens - 1) // chunk, (tokens - 1) % chunk + 1
        last_s = self._chunk_s(last, decoding, pairs * last // tokens)
        return last_s + full * self._chunk_s(chunk, decoding, pairs * chunk // tokens) if full else last_s

    def _chunk_s(self, tokens: int, decoding: int, pairs: int) -> float:
        """A step with a chunk of one prompt, which has so many query-key pairs, or more where it is longer than they say."""
        alone = prompt_pairs(tokens)
        behind = pairs - alone if pairs > alone else 0
        return self.step_s(decoding, 0, tokens, alone + behind, behind // tokens, decoding + 1)

    def provenance(self) -> list[Provenance]:
        """Every number behind these step times, with its source."""
        deployed, group = self.deployment, self.deployment.group if self.tp > 1 else None
        host = {
            "host.overhead_s": deployed.overhead_s,
            "host.sequence_s": deployed.sequence_s,
            "host.floor_s": deployed.floor(self.precision.name, self.model.layers, self.tp),
            "host.doubling_s": group.doubling_s if group else None,
            "host.prompt_s": group.prompt_s if group else None,
            "host.fused_quantisation_s": deployed.fused_quantisation_s,
        }
        kernel = self.attention.provenance() if isinstance(self.attention, LegacyAttention) else []
        return [*self.operators.provenance(), *kernel] + [
            Provenance(name, quantity.value, "s", quantity.kind, quantity.source)
            for name, quantity in host.items()
            if quantity
        ]
