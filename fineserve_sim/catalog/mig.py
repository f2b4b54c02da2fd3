"""A slice of a GPU by MIG as a GPU of its own: its SMs, its memory, its eighths of the bandwidth, no NVLink."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fineserve_sim.catalog.load import mig_gpu
from fineserve_sim.catalog.specs import GpuSpec, MigGpu


def mig_slices(whole: GpuSpec, profile: str) -> list[GpuSpec]:
    """As many slices of this profile as fit on the GPU. Raises ValueError naming the GPUs or profiles that there are."""
    table = mig_gpu(whole.name)
    return [_slice(whole, table, profile)] * table.profiles[table.named(profile)].most


def mig_parts(whole: GpuSpec, profiles: Sequence[str]) -> list[GpuSpec]:
    """One slice of each of these profiles, which may differ. Raises ValueError as ``mig_slices``, and where they do not fit
    together. A GPU has 7 slices of its SMs and 8 of its memory; a profile's name begins with how many of the 7 it takes."""
    table = mig_gpu(whole.name)
    names = [table.named(profile) for profile in profiles]
    for name, count in Counter(names).items():
        if count > table.profiles[name].most:
            raise ValueError(f"{whole.name} has room for {table.profiles[name].most} slices of {name}, not for {count}")
    sms, memory = (
        sum(int(name.split("g")[0]) for name in names),
        sum(table.profiles[name].memory_slices for name in names),
    )
    if sms > 7 or memory > 8:
        raise ValueError(
            f"{' + '.join(names)} do not fit on one {whole.name}: they take {sms} of 7 slices of its SMs and {memory} of 8 of "
            "its memory"
        )
    return [_slice(whole, table, name) for name in names]


def _slice(whole: GpuSpec, table: MigGpu, profile: str) -> GpuSpec:
    profile = table.named(profile)
    compute, bandwidth = table.fractions(profile)
    part = table.profiles[profile]
    peaks = ("bf16_flops_per_s", "fp32_flops_per_s", "fp8_flops_per_s", "int8_flops_per_s", "fp4_flops_per_s")
    cut = {name: peak * compute for name in peaks if (peak := getattr(whole, name)) is not None}
    cut |= {
        "name": f"{whole.name} {profile}",
        "memory_gib": part.memory_mib / 1024,
        "memory_bytes_per_s": whole.memory_bytes_per_s * bandwidth,
        "tiling_sms": whole.tiling_sms and part.sms,
        "nvlink_bytes_per_s": 0.0,
        "efficiency": "roofline-scaled",
        "whole": whole.name,
        "source": f"{whole.source}; {table.source}",
    }
    return whole.model_copy(update=cut)
