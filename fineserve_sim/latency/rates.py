"""Kernel rates of one GPU: those measured on the reference GPU, or scaled from them.

A rate on another GPU keeps the fraction of peak that the reference GPU reached: matrix products by the peak of their
tensor-core type, memory-bound kernels by memory bandwidth, all-reduce by the link between the GPUs of a node. Launch
times stay as they are. Scaled rates are marked ``roofline`` and carried-over launch times ``assumed``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from fineserve_sim.catalog import (
    GemmKernel,
    GpuSpec,
    Kind,
    PrecisionSpec,
    Quantity,
    StreamKernel,
    gpu,
    kernel_rates,
)
from fineserve_sim.catalog import precision as stored_precision

Kernel = StreamKernel | GemmKernel
BITS_16 = 16


class Provenance(NamedTuple):
    """One number of the latency model and where it comes from."""

    quantity: str
    value: float
    unit: str
    kind: Kind
    source: str


@dataclass(frozen=True, slots=True)
class Rates:
    """The kernels of an engine on its GPU. ``attention.bytes_per_s`` reads the KV cache; TP 1 has no ``all_reduce``, a dense
    model no ``experts``."""

    gemm: GemmKernel
    lm_head: GemmKernel
    attention: GemmKernel
    norm: StreamKernel
    residual_add: StreamKernel
    rope: StreamKernel
    activation: StreamKernel
    embedding: StreamKernel
    all_reduce: StreamKernel | None
    experts: GemmKernel | None = None

    def provenance(self) -> Iterator[Provenance]:
        """Every quantity of every kernel."""
        units = {"launch_s": "s", "bytes_per_s": "B/s", "flops_per_s": "FLOP/s"}
        for kernel_field in fields(self):
            kernel: Kernel | None = getattr(self, kernel_field.name)
            if kernel is None:
                continue
            for name in type(kernel).model_fields:
                quantity: Quantity = getattr(kernel, name)
                yield Provenance(
                    f"{kernel_field.name}.{name}", quantity.value, units[name], quantity.kind, quantity.source
                )


def _carried(quantity: Quantity, reference: GpuSpec) -> Quantity:
    source = f"as on {reference.name}: {quantity.source}"
    return Quantity(value=quantity.value, kind="assumed", source=source)


def _scaled(quantity: Quantity, peak: float, reference_peak: float, reference: GpuSpec) -> Quantity:
    source = f"same fraction of the data-sheet peak as on {reference.name}: {quantity.source}"
    return Quantity(value=quantity.value * (peak / reference_peak), kind="roofline", source=source)


@dataclass(frozen=True, slots=True)
class _Target:
    """Carries kernels from the reference GPU to another one."""

    gpu: GpuSpec
    reference: GpuSpec

    def stream(self, kernel: StreamKernel, link: bool = False) -> StreamKernel:
        """A kernel bound by memory, or by the peer link."""
        if self.gpu.efficiency == "measured":
            return kernel
        name = "peer_bytes_per_s" if link else "memory_bytes_per_s"
        rate = _scaled(kernel.bytes_per_s, getattr(self.gpu, name), getattr(self.reference, name), self.reference)
        return StreamKernel(launch_s=_carried(kernel.launch_s, self.reference), bytes_per_s=rate)

    def gemm(self, kernel: GemmKernel, peak: float, reference_peak: float) -> GemmKernel:
        """A kernel bound by memory or by a tensor-core type with these peaks."""
        if self.gpu.efficiency == "measured":
            return kernel
        stream = self.stream(kernel)
        flops = _scaled(kernel.flops_per_s, peak, reference_peak, self.reference)
        return GemmKernel(launch_s=stream.launch_s, bytes_per_s=stream.bytes_per_s, flops_per_s=flops)


MARLIN_EXPERTS = "W4A16-experts"
"""The experts that stand for narrower weights in 16-bit products: vLLM's kernel of both is Marlin where a GPU lacks FP8."""


def _weight_only(kernel: GemmKernel, bits: int) -> GemmKernel:
    """Products in 16 bits on weights of ``bits``: at the rates of another kernel that unpacks, or of 16 bits; not measured."""
    rates = {
        name: Quantity(
            value=quantity.value, kind="assumed", source=f"{bits}-bit weights unpacked to 16 bits: {quantity.source}"
        )
        for name in GemmKernel.model_fields
        if (quantity := getattr(kernel, name))
    }
    return GemmKernel(**rates)


def _marlin_peaks(
    precision: PrecisionSpec, peaks: tuple[float, float], gpu_spec: GpuSpec, reference: GpuSpec
) -> tuple[float, float]:
    """The peaks of a kernel on both GPUs. Marlin (narrower weights in 16-bit products) reaches the peaks of mma.sync."""
    if precision.activation_bits != BITS_16 or precision.weight_bits == BITS_16 or precision.name.endswith("Triton"):
        return peaks
    return gpu_spec.mma_part * peaks[0], reference.mma_part * peaks[1]


FUSED_REACHES = 0.9
"""The part of its memory rate that a GPU reaches in a kernel that vLLM compiled. Measured: the activation of 2,048 tokens,
25,600 wide, moves 315 MB in 195 us on an RTX PRO 6000 (vLLM 0.19, LLMServingSim's profile @ 5f18d86bf100; MIT). What
fits in the L2 cache is faster."""


def compiled(rates: Rates, gpu_spec: GpuSpec) -> Rates:
    """The rates of an engine that compiles its element-wise kernels."""
    source = "activation of 2,048 tokens on an RTX PRO 6000, vLLM 0.19; LLMServingSim profile @ 5f18d86bf100"
    rate = Quantity(value=FUSED_REACHES * gpu_spec.memory_bytes_per_s, kind="roofline", source=source)
    # The kernel of a norm adds the residual: what the sum would write and the norm read again stays in it.
    source = f"two of the three arrays of an addition at the rate of: {source}"
    added = Quantity(value=1.5 * rate.value, kind="roofline", source=source)
    found = dict.fromkeys(("norm", "rope", "activation"), rate) | {"residual_add": added}
    return replace(
        rates, **{name: getattr(rates, name).model_copy(update={"bytes_per_s": one}) for name, one in found.items()}
    )


def resolve(gpu_spec: GpuSpec, precision: PrecisionSpec, tp: int, experts: bool = False) -> Rates:
    """Kernel rates of ``gpu_spec`` for one precision and TP degree, of a model with ``experts`` or without.

    Raises ValueError when the GPU lacks the precision's tensor cores, or the precision or TP degree has no rate.
    """
    precision, table = precision.on(gpu_spec), kernel_rates()
    if precision.name not in table.gemm or precision.kv_bits not in table.kv_bytes_per_s:
        raise ValueError(f"precision {precision.name} has no kernel rates; known: {', '.join(table.gemm)}")
    if tp != 1 and tp not in table.all_reduce:
        raise ValueError(f"TP {tp} has no all-reduce rate; known: 1, {', '.join(map(str, table.all_reduce))}")
    if experts and precision.name not in table.experts:
        raise ValueError(f"precision {precision.name} has no rates of experts; known: {', '.join(table.experts)}")
    reference = gpu(table.reference_gpu)
    target = _Target(gpu_spec, reference)
    core = precision.tensor_core
    peaks = gpu_spec.peak_flops_per_s(core), reference.peak_flops_per_s("fp8" if core == "fp4" else core)
    narrow = _marlin_peaks(precision, peaks, gpu_spec, reference)
    product, product_peaks = table.gemm[precision.name], peaks
    moe = table.experts.get(precision.name)
    if precision.activation_bits > stored_precision(precision.name).activation_bits:
        moe = _weight_only(table.experts[MARLIN_EXPERTS], precision.weight_bits)
    if precision.weight_bits == 8 and core == "bf16":
        product = _weight_only(table.gemm["W16A16"], precision.weight_bits)
    elif precision.weight_bits == 4 and core == "bf16" and precision.scope == "linears":
        product, product_peaks = table.gemm["W4A16"], narrow
    bf16 = (gpu_spec.bf16_flops_per_s, reference.bf16_flops_per_s)
    attention = GemmKernel(
        launch_s=table.attention.launch_s,
        flops_per_s=table.attention.flops_per_s,
        bytes_per_s=table.kv_bytes_per_s[precision.kv_bits],
    )
    small = table.elementwise
    return Rates(
        gemm=target.gemm(product, *product_peaks),
        lm_head=target.gemm(table.gemm["W16A16"], *bf16),
        attention=target.gemm(attention, *bf16),
        norm=target.stream(small.norm),
        residual_add=target.stream(small.residual_add),
        rope=target.stream(small.rope),
        activation=target.stream(small.activation),
        embedding=target.stream(small.embedding),
        all_reduce=target.stream(table.all_reduce[tp], link=True) if tp > 1 else None,
        experts=target.gemm(moe, *narrow) if experts and moe else None,
    )
