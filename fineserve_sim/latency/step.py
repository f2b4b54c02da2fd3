"""Seconds of one engine step from a few running sums of its batch.

    step   = overhead + max(device, host floor)
    device = tokens[decodes + prefill_tokens] + lm_head[sampled] + decode attention + prefill attention

The first two terms are tables built from the operators' rooflines. Decode attention reads the whole KV cache of the
decoding sequences, prefill attention is a roofline of query-key pairs against the KV it reads. ``decode_steps_s`` does
the same IEEE operations in the same order as ``step_s``, so both agree bit for bit.

Not modelled: kernels slower than their large-shape rate at middle sizes (wave quantisation, short-prompt attention).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fineserve_sim.catalog import Deployment, GpuSpec, ModelSpec, PrecisionSpec
from fineserve_sim.latency.operators import Cost, Floats, Operators, total
from fineserve_sim.latency.rates import Provenance, resolve

INITIAL_ENTRIES = 512
SCALAR_STEPS = 24  # below, a loop is faster than numpy's fixed cost


class _Table:
    """Costs of 0, 1, 2, ... rows as plain lists, grown on demand; row 0 costs nothing."""

    __slots__ = ("_cost", "compute_s", "memory_s", "seconds")

    def __init__(self, operators: Operators, sampled: bool) -> None:
        self._cost = operators.by_sampled if sampled else operators.by_tokens
        self.seconds: list[float] = [0.0]
        self.compute_s: list[float] = [0.0]
        self.memory_s: list[float] = [0.0]
        self.grow(INITIAL_ENTRIES)

    def grow(self, rows: int) -> None:
        """Extend the lists in place so that index ``rows`` exists."""
        first = len(self.seconds)
        last = max(rows, 2 * first)
        cost: Cost = total(self._cost(np.arange(first, last + 1, dtype=np.float64)))
        self.seconds += cost.seconds.tolist()
        self.compute_s += cost.compute_s.tolist()
        self.memory_s += cost.memory_s.tolist()


class StepModel:
    """Step times of one engine: a model in a precision on a TP group of one GPU type, run by a deployment.

    Arguments common to the methods: ``decodes`` sequences decode one token each, with ``decode_context`` tokens cached
    in all before the step; ``prefill_tokens`` prompt tokens are computed, with ``prefill_pairs`` query-key pairs (for a
    chunk of c tokens after a cached prefix: c * prefix + c * (c + 1) / 2) and ``prefill_context`` cached prefix tokens
    in all; ``sampled`` sequences produce a token. All are sums over the batch; results are seconds without contention.

    Raises ValueError when the model does not split over ``tp``, the GPU cannot compute in the precision, or no rate or
    host floor is known for it.
    """

    def __init__(
        self, model: ModelSpec, precision: PrecisionSpec, tp: int, gpu: GpuSpec, deployment: Deployment
    ) -> None:
        self.model, self.precision, self.tp, self.gpu, self.deployment = model, precision, tp, gpu, deployment
        self._operators = Operators(model, precision, tp, resolve(gpu, precision, tp))
        self._tokens = _Table(self._operators, sampled=False)
        self._sampled = _Table(self._operators, sampled=True)
        self._tokens_s, self._sampled_s = self._tokens.seconds, self._sampled.seconds
        self._kv_s, self._pair_s = self._operators.kv_s, self._operators.pair_s
        floor = deployment.floor(precision.name)
        self._floor_s = floor.value if floor else 0.0
        self._overhead_s = deployment.overhead_s.value

    def _reserve(self, tokens: int, sampled: int) -> None:
        if tokens >= len(self._tokens_s):
            self._tokens.grow(tokens)
        if sampled >= len(self._sampled_s):
            self._sampled.grow(sampled)

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
        device = self._tokens_s[tokens] + self._sampled_s[sampled] + (decode_context + decodes) * self._kv_s
        if prefill_tokens:
            compute = prefill_pairs * self._pair_s
            memory = (prefill_context + prefill_tokens) * self._kv_s
            device += compute if compute > memory else memory
        return self._overhead_s + (device if device > self._floor_s else self._floor_s)

    def decode_steps_s(self, decodes: int, decode_context: int, steps: int) -> NDArray[np.float64]:
        """Seconds of each of ``steps`` consecutive decode-only steps, shape (steps,): step i equals
        ``step_s(decodes, decode_context + i * decodes, 0, 0, 0, decodes)`` bit for bit."""
        self._reserve(decodes, decodes)
        context = np.arange(1, steps + 1, dtype=np.int64) * decodes + decode_context
        device = (self._tokens_s[decodes] + self._sampled_s[decodes]) + context * self._kv_s
        seconds: Floats = self._overhead_s + np.maximum(device, self._floor_s)
        return seconds

    def decode_ends_s(
        self, start_s: float, decodes: int, decode_context: int, steps: int, slowdown: float
    ) -> list[float]:
        """End times of consecutive decode-only steps from ``start_s``, each ``slowdown`` times as long as alone: the same
        bits as adding ``step_s(...) * slowdown`` one by one."""
        if steps <= SCALAR_STEPS:
            self._reserve(decodes, decodes)
            batch_s = self._tokens_s[decodes] + self._sampled_s[decodes]
            now, ends = start_s, []
            for context in range(decode_context + decodes, decode_context + steps * decodes + 1, decodes):
                device = batch_s + context * self._kv_s
                now += (self._overhead_s + (device if device > self._floor_s else self._floor_s)) * slowdown
                ends.append(now)
            return ends
        times = np.empty(steps + 1)
        times[0] = start_s
        np.multiply(self.decode_steps_s(decodes, decode_context, steps), slowdown, out=times[1:])
        result: list[float] = np.cumsum(times)[1:].tolist()  # cumsum adds one by one, in order
        return result

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
        compute_s = self._tokens.compute_s[tokens] + self._sampled.compute_s[sampled] + prefill_pairs * self._pair_s
        kv_tokens = decode_context + tokens + prefill_context
        memory_s = self._tokens.memory_s[tokens] + self._sampled.memory_s[sampled] + kv_tokens * self._kv_s
        return compute_s / step_s, memory_s / step_s

    def prefill_s(self, tokens: int, decoding: int, budget: int) -> float:
        """Predicted seconds to prefill ``tokens`` prompt tokens in chunks of ``budget - decoding``.

        Non-decreasing in ``tokens``; infinite when the decodes leave nothing. A scheduler's estimate from counts alone:
        each chunk attends to itself only, and the decodes' own contexts are not charged.
        """
        if tokens <= 0:
            return 0.0
        chunk = budget - decoding
        if chunk <= 0:
            return math.inf
        full, last = (tokens - 1) // chunk, (tokens - 1) % chunk + 1
        seconds = self.step_s(decoding, 0, last, last * (last + 1) // 2, 0, decoding + 1)
        if full:
            seconds += full * self.step_s(decoding, 0, chunk, chunk * (chunk + 1) // 2, 0, decoding + 1)
        return seconds

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
        costs = self._operators.by_tokens(np.array([float(tokens)])) if tokens else {}
        costs |= self._operators.by_sampled(np.array([float(sampled)])) if sampled else {}
        parts = {name: float(cost.seconds[0]) for name, cost in costs.items()}
        parts["decode_attention"] = (decode_context + decodes) * self._kv_s
        read_s = (prefill_context + prefill_tokens) * self._kv_s
        parts["prefill_attention"] = max(prefill_pairs * self._pair_s, read_s) if prefill_tokens else 0.0
        step_s = self.step_s(decodes, decode_context, prefill_tokens, prefill_pairs, prefill_context, sampled)
        parts["host"] = step_s - sum(parts.values())
        return parts

    def provenance(self) -> list[Provenance]:
        """Every number behind these step times, with its source."""
        lines = list(self._operators.rates.provenance())
        overhead = self.deployment.overhead_s
        lines.append(Provenance("host.overhead_s", overhead.value, "s", overhead.kind, overhead.source))
        floor = self.deployment.floor(self.precision.name)
        if floor:
            lines.append(Provenance("host.floor_s", floor.value, "s", floor.kind, floor.source))
        return lines
