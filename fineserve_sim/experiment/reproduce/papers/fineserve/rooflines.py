"""FineServe's rooflines (Fig. 2), evaluated: claims FS-2-*."""

from __future__ import annotations

from fineserve_sim.catalog import GpuSpec, PrecisionSpec, gpu, precision
from fineserve_sim.experiment.reproduce.judge import Evaluation, holds, numbers
from fineserve_sim.experiment.reproduce.registry import claim

FORMATS = ("W16A16", "W8A8KV8", "W4A16", "W4A8KV4")
"""FP16, FP8, AWQ and QoQ."""

TOKENS = [2**exponent for exponent in range(13)]
"""Tokens a batch, over which a matrix product is looked at."""


def _seconds_per_weight(spec: GpuSpec, fmt: PrecisionSpec, tokens: int) -> float:
    """The roofline of a matrix product, per weight: two operations a token, or reading the weight's ideal bits."""
    return max(2 * tokens / spec.peak_flops_per_s(fmt.tensor_core), fmt.weight_bits / 8 / spec.memory_bytes_per_s)


def _relative_rates(tokens: int) -> tuple[float, ...]:
    """Rate of each format over FP16's."""
    spec = gpu("h100-sxm")
    seconds = [_seconds_per_weight(spec, precision(name), tokens) for name in FORMATS]
    return tuple(seconds[0] / each for each in seconds)


@claim("FS-2-compute")
def compute_roofs() -> Evaluation:
    """What FP8 and QoQ gain over FP16 where computing is the limit; AWQ computes as FP16 does."""
    fp16, fp8, awq, qoq = _relative_rates(TOKENS[-1])
    return numbers(
        fp8 / fp16, qoq / awq, detail=f"Peaks of the H100 at {TOKENS[-1]:,} tokens: data-sheet rates, no kernel."
    )


@claim("FS-2-memory")
def memory_roofs() -> Evaluation:
    """Rates over FP16's at one token, where reading weights is the limit."""
    fp16, fp8, awq, qoq = _relative_rates(1)
    return numbers(fp16, fp8, awq, qoq, detail="Bits of a weight alone, group scales left out.")


@claim("FS-2-qoq-region")
def qoq_envelope() -> Evaluation:
    """QoQ against the better of FP8 and AWQ at every number of tokens."""
    rates = {tokens: _relative_rates(tokens) for tokens in TOKENS}
    better = [tokens for tokens, (_, fp8, awq, qoq) in rates.items() if qoq > 1.01 * max(fp8, awq)]
    never_below = all(qoq >= 0.999 * max(fp8, awq) for _, fp8, awq, qoq in rates.values())
    return holds(
        never_below and bool(better),
        f"1 to {TOKENS[-1]:,} tokens; QoQ is strictly better at {', '.join(map(str, better))}.",
    )
