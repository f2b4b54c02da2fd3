"""A slice of a GPU by MIG as a GPU of its own: its SMs, its memory, its eighths of the bandwidth, no NVLink."""

from __future__ import annotations

from fineserve_sim.catalog.load import mig_gpu
from fineserve_sim.catalog.specs import GpuSpec


def mig_slices(whole: GpuSpec, profile: str) -> list[GpuSpec]:
    """As many slices of this profile as fit on the GPU. Raises ValueError naming the GPUs or profiles that there are."""
    table = mig_gpu(whole.name)
    compute, bandwidth = table.fractions(profile)
    part = table.profiles[profile]
    peaks = ("bf16_flops_per_s", "fp8_flops_per_s", "int8_flops_per_s", "fp4_flops_per_s")
    cut = {name: peak * compute for name in peaks if (peak := getattr(whole, name)) is not None}
    cut |= {
        "name": f"{whole.name} {profile}",
        "memory_gib": part.memory_mib / 1024,
        "memory_bytes_per_s": whole.memory_bytes_per_s * bandwidth,
        "nvlink_bytes_per_s": 0.0,
        "efficiency": "roofline-scaled",
        "whole": whole.name,
        "source": f"{whole.source}; {table.source}",
    }
    return [whole.model_copy(update=cut)] * part.most
