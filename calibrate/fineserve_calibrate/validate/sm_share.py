"""An engine under an MPS share of the SMs is an engine on a smaller GPU.

Matrix products and attention run at a measured part of their rate: not in proportion to the share, since the whole GPU is
limited by power, and the library picks other tiles for other numbers of SMs. Memory-bound kernels run at
``min(1, share / memory_saturation)``: few SMs keep memory busy, so decode hardly slows until then. Launches and host time
do not change. Only the authors' profile records shares: ``sm_shares.yaml`` holds what its rows with 256 input tokens give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import yaml

from fineserve_sim.catalog import GpuSpec


@dataclass(frozen=True, slots=True)
class SmShare:
    """How one precision's rates fall: compute rate by share, against all SMs, and the share that saturates memory."""

    compute: Mapping[float, float]
    memory_saturation: float

    def compute_at(self, share: float) -> float:
        """The part of the compute rate at ``share`` in (0, 1]: between measured shares log-log, below them in proportion."""
        points = dict(self.compute) | {1.0: 1.0}
        shares = np.array(sorted(points))
        rates = np.array([points[at] for at in shares.tolist()])
        inside = np.exp(np.interp(np.log(share), np.log(shares), np.log(rates)))
        return float(inside * min(1.0, share / shares[0]))

    def slice_of(self, whole: GpuSpec, share: float) -> GpuSpec:
        """The GPU that an engine with this share (0, 1] sees: ``whole`` itself where nothing binds."""
        compute, memory = self.compute_at(share), min(1.0, share / self.memory_saturation)
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


@cache
def sm_shares() -> Mapping[str, SmShare]:
    """The fitted laws by precision."""
    text = files("fineserve_calibrate.validate").joinpath("sm_shares.yaml").read_text(encoding="utf-8")
    return {name: SmShare(**fields) for name, fields in yaml.safe_load(text).items()}
