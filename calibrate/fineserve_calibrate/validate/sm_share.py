"""An engine under an MPS share of the SMs is an engine on a smaller GPU.

With a share s of the SMs, matrix products run at ``s ** compute_exponent`` of their rate: less than in proportion, as the
whole GPU is limited by power and clocks rise when SMs are idle. Memory-bound kernels run at ``min(1, s / memory_saturation)``:
few SMs keep memory busy, so decode hardly slows until then. Launches and host time do not change. Two numbers a kernel family
(precision), fitted to the rows of the authors' profile with 256 input tokens; only that set records shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fineserve_sim.catalog import GpuSpec

EXPONENTS = tuple(np.round(np.arange(0.5, 1.001, 0.05), 2).tolist())
SATURATIONS = tuple(np.round(np.arange(0.05, 1.001, 0.05), 2).tolist())
ROUNDS = 2
"""Both numbers act on prefill and decode alike, a little: each is fitted again beside the other."""


@dataclass(frozen=True, slots=True)
class SmShare:
    """How rates fall with the share of the SMs: the compute rate's exponent, and the share that saturates memory."""

    compute_exponent: float
    memory_saturation: float

    def slice_of(self, whole: GpuSpec, share: float) -> GpuSpec:
        """The GPU that an engine with this share (0, 1] sees: ``whole`` itself where nothing binds."""
        compute, memory = share**self.compute_exponent, min(1.0, share / self.memory_saturation)
        if compute == memory == 1.0:
            return whole
        peaks = {
            name: peak * compute
            for name in ("bf16_flops_per_s", "fp8_flops_per_s", "int8_flops_per_s")
            if (peak := getattr(whole, name)) is not None
        }
        rates = {**peaks, "memory_bytes_per_s": whole.memory_bytes_per_s * memory}
        return whole.model_copy(
            update={**rates, "name": f"{whole.name} {share:.0%} SMs", "efficiency": "roofline-scaled"}
        )


def fit_sm_share(
    ttft_errors: Callable[[SmShare], Sequence[float]], tpot_errors: Callable[[SmShare], Sequence[float]]
) -> SmShare:
    """Least mean absolute log error, in turn: the exponent on prefills, the saturation on decodes.

    The callables give the relative errors of the fitted rows for a candidate.
    """
    found = SmShare(1.0, 0.2)
    for _ in range(ROUNDS):
        exponents = [replace(found, compute_exponent=exponent) for exponent in EXPONENTS]
        found = min(exponents, key=lambda candidate: _loss(ttft_errors(candidate)))
        saturations = [replace(found, memory_saturation=saturation) for saturation in SATURATIONS]
        found = min(saturations, key=lambda candidate: _loss(tpot_errors(candidate)))
    return found


def _loss(errors: Sequence[float]) -> float:
    return float(np.abs(np.log1p(errors)).mean())
