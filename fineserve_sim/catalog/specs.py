"""What the catalog's entries are: GPUs, models, precisions, deployments and kernel rates, checked when they are read.

Every entry carries its source. Bytes and tokens are ints, rates are per second, links count one direction.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

TensorCore = Literal["bf16", "fp8", "int8", "fp4"]
Kind = Literal["measured", "fitted", "roofline", "assumed"]


class Spec(BaseModel):
    """Base of all entries: immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Quantity(Spec):
    """A number that says where it comes from."""

    value: float = Field(ge=0)
    kind: Kind
    source: str


class GpuSpec(Spec):
    """One GPU type by its data sheet: dense peaks, nominal memory, link rates per direction (0: no NVLink).

    ``fp32_flops_per_s``: of its CUDA cores; None: a sixteenth of the BF16 peak, as of an A100.
    ``mma_part``: of the BF16 peak that the instructions of earlier generations reach (mma.sync), on which Marlin is built.
    ``tiling_sms``: its SMs, where vLLM's attention on it is FlashAttention 2.
    ``whole``: the GPU type of which it is a slice by MIG. ``tables_from``: the GPU type whose measured tables are scaled to it.
    """

    name: str
    memory_gib: float = Field(gt=0)
    memory_bytes_per_s: float = Field(gt=0)
    bf16_flops_per_s: float = Field(gt=0)
    fp32_flops_per_s: float | None = Field(default=None, gt=0)
    fp8_flops_per_s: float | None = None
    int8_flops_per_s: float | None = None
    fp4_flops_per_s: float | None = None
    mma_part: float = Field(default=1.0, gt=0, le=1)
    tiling_sms: int | None = Field(default=None, gt=0)
    nvlink_bytes_per_s: float = Field(default=0.0, ge=0)
    pcie_bytes_per_s: float = Field(gt=0)
    efficiency: Literal["measured", "roofline-scaled"]
    source: str
    whole: str | None = None
    tables_from: str | None = None

    @property
    def memory_bytes(self) -> int:
        """Nominal memory: a card sold as N GB counts as N GiB (systems.md 1.2)."""
        return round(self.memory_gib * 2**30)

    @property
    def peer_bytes_per_s(self) -> float:
        """Link to the other GPUs of the node: NVLink, else PCIe."""
        return self.nvlink_bytes_per_s or self.pcie_bytes_per_s

    @property
    def cuda_core_flops_per_s(self) -> float:
        """Peak of products in 32 bits."""
        return self.fp32_flops_per_s or self.bf16_flops_per_s / 16

    def peak_flops_per_s(self, core: TensorCore) -> float:
        """Dense peak of one tensor-core type. Raises ValueError when the GPU has none."""
        peak: float | None = getattr(self, f"{core}_flops_per_s")
        if peak is None:
            raise ValueError(
                f"GPU {self.name} has no {core} tensor cores; choose a precision that computes in another type"
            )
        return peak


class ListPrices(Spec):
    """Dollars of a GPU-hour by GPU type: a provider's list, on demand, as it stood on a day. A default, not a quotation."""

    provider: str
    read_on: str
    source: str
    usd_per_gpu_hour: dict[str, float]


class MigProfile(Spec):
    """A slice of a GPU: SMs, memory, eighths of its bandwidth, and how many of them fit."""

    sms: int = Field(gt=0)
    memory_mib: int = Field(gt=0)
    memory_slices: int = Field(ge=1, le=8)
    most: int = Field(ge=1)


_MEMORY_NAMES = 0.1
"""How far the memory in the name of a MIG profile may be from what it has: a 1g.10gb of an A100 has 9.6 GiB."""


class MigGpu(Spec):
    """A GPU that MIG divides."""

    name: str
    sms: int = Field(gt=0)
    profiles: dict[str, MigProfile]
    source: str

    def named(self, profile: str) -> str:
        """The profile of this name, with or without its memory: ``3g`` or NVIDIA's ``3g.40gb``. Raises ValueError naming the
        profiles that there are."""
        slices, _, memory = profile.partition(".")
        if profile in self.profiles:
            return profile
        for name, part in self.profiles.items():
            gib = part.memory_mib / 1024
            alike = name.removesuffix("+") == slices and memory.removesuffix("gb").isdecimal()
            if alike and abs(int(memory.removesuffix("gb")) / gib - 1) < _MEMORY_NAMES:
                return name
        raise ValueError(f"{self.name} has no MIG profile {profile}; known: {', '.join(self.profiles)}")

    def fractions(self, profile: str) -> tuple[float, float]:
        """The parts of the GPU's SMs and of its memory bandwidth. Raises ValueError naming the profiles that there are."""
        part = self.profiles[self.named(profile)]
        return part.sms / self.sms, part.memory_slices / 8


class PrecisionSpec(Spec):
    """How weights, activations and KV cache are stored, and on which tensor cores the linear layers run.

    ``scope``: all linear layers of the blocks, or experts alone; others keep 16 bits.
    """

    name: str
    aliases: tuple[str, ...] = ()
    weight_bits: int = Field(gt=0)
    group_size: int = Field(default=0, ge=0)
    scale_bits: int = Field(default=0, ge=0)
    zero_bits: int = Field(default=0, ge=0)
    activation_bits: int = Field(gt=0)
    kv_bits: int = Field(gt=0)
    kv_quant_bytes: int = Field(default=0, ge=0)
    tensor_core: TensorCore
    scope: Literal["linears", "experts"] = "linears"
    source: str

    def on(self, gpu: GpuSpec) -> PrecisionSpec:
        """As this GPU computes it: without FP8 or FP4 tensor cores, such weights are products in 16 bits (weight-only)."""
        peaks = {"fp8": gpu.fp8_flops_per_s, "fp4": gpu.fp4_flops_per_s}
        if self.tensor_core not in peaks or peaks[self.tensor_core] is not None:
            return self
        return self.model_copy(update={"activation_bits": 16, "tensor_core": "bf16"})

    @property
    def effective_weight_bits(self) -> float:
        """Bits per weight of a linear layer with its group's scale and zero point."""
        if self.group_size == 0:
            return float(self.weight_bits)
        return self.weight_bits + (self.scale_bits + self.zero_bits) / self.group_size


class GroupCosts(Spec):
    """What a step of a TP group costs its hosts, beyond a step of a single GPU.

    * ``doubling_s``: for every doubling of the ranks, which wait for the last one to begin.
    * ``prompt_s``: for a step that carries prompts, at any number of ranks; new requests are sent to the workers.
    * ``collective_s``: by ranks, the launch of one all-reduce without CUDA graphs; a layer has two. None: graphs replay them.
    """

    doubling_s: Quantity
    prompt_s: Quantity
    collective_s: dict[int, Quantity] | None = None


class Deployment(Spec):
    """Host side of an engine generation: a step lasts ``overhead + sequences x sequence_s + max(device time, floor)``.

    * ``sequence_s``: for each sequence that gets a token (sampler, block tables, detokeniser and stream).
    * ``host_floors``: by precision, how long the host takes to launch the kernels of a step one by one. It is for a model of
      ``floor_layers`` layers on one GPU, and grows with the layers. None: CUDA graphs are replayed, so launches never bound
      the step.
    * ``group``: what a TP group adds; None: nothing is known to.
    * ``fused_quantisation_s``: what a matrix product with 8-bit activations takes less than measured, where the engine
      quantises inside the kernel before it.
    * ``aligned_expert_rows``: rows to which the engine pads each 8-bit expert's share of a batch; None: it does not.
    * ``logit_bytes``: bytes of a logit when the sampler peaks; None: as vLLM's, which sorts.
    * ``fuses_elementwise``: the engine compiles its small kernels, which then move memory as fast as it goes.
    * ``one_attention_kernel``: decodes and prompts of a step go through one kernel, in which a decode fills a tile on GPUs
      that have it (``GpuSpec.tiling_sms``).
    * ``draft_pass_s``, ``draft_sequence_s``: what each pass of a draft model takes beside its kernels, and for each sequence.
      None: nothing.
    """

    name: str
    draft_pass_s: Quantity | None = None
    draft_sequence_s: Quantity | None = None
    logit_bytes: int | None = Field(default=None, gt=0)
    fuses_elementwise: bool = False
    one_attention_kernel: bool = False
    overhead_s: Quantity
    sequence_s: Quantity | None = None
    host_floors: dict[str, Quantity] | None = None
    floor_layers: int = Field(default=32, gt=0)
    group: GroupCosts | None = None
    fused_quantisation_s: Quantity | None = None
    aligned_expert_rows: int | None = Field(default=None, gt=0)

    @property
    def replays_graphs(self) -> bool:
        """Whether steps replay CUDA graphs, captured when the engine starts."""
        return self.host_floors is None

    def overhead(self, tp: int) -> float:
        """Seconds of a step, on a group of ``tp`` ranks."""
        return self.overhead_s.value + (self.group.doubling_s.value * math.log2(tp) if self.group else 0.0)

    def prompt(self, tp: int) -> float:
        """Seconds that a step with prompts takes beside them."""
        return self.group.prompt_s.value if self.group and tp > 1 else 0.0

    def floor(self, precision: str, layers: int | None = None, tp: int = 1) -> Quantity | None:
        """Host floor of a precision, for a model of ``layers`` layers (None: as measured); None without floors.

        Raises ValueError when the deployment has floors, but none for this precision.
        """
        if self.host_floors is None:
            return None
        if precision not in self.host_floors:
            known = ", ".join(self.host_floors)
            raise ValueError(f"deployment {self.name} has no host floor for precision {precision}; measured: {known}")
        measured = self.host_floors[precision]
        if layers is not None and layers != self.floor_layers:
            source = f"in proportion to layers, {layers} / {self.floor_layers}; {measured.source}"
            measured = Quantity(value=measured.value * layers / self.floor_layers, kind="assumed", source=source)
        return self._with_collectives(measured, layers or self.floor_layers, tp)

    def _with_collectives(self, floor: Quantity, layers: int, tp: int) -> Quantity:
        if tp == 1 or self.group is None or self.group.collective_s is None:
            return floor
        launch = self.group.collective_s.get(tp) or self.group.collective_s[max(self.group.collective_s)]
        source = f"{floor.source}; with two collectives a layer: {launch.source}"
        return Quantity(value=floor.value + 2 * layers * launch.value, kind=floor.kind, source=source)


class StreamKernel(Spec):
    """A kernel bound by data movement: ``launch_s + bytes / bytes_per_s``."""

    launch_s: Quantity
    bytes_per_s: Quantity


class GemmKernel(StreamKernel):
    """A matrix product: ``launch_s + max(flops / flops_per_s, bytes / bytes_per_s)``."""

    flops_per_s: Quantity


class AttentionKernel(Spec):
    """The attention of one layer; its KV bandwidth depends on the KV format (``KernelRates.kv_bytes_per_s``)."""

    launch_s: Quantity
    flops_per_s: Quantity


class ElementwiseKernels(Spec):
    """The small kernels around the matrix products."""

    norm: StreamKernel
    residual_add: StreamKernel
    rope: StreamKernel
    activation: StreamKernel
    embedding: StreamKernel


class KernelRates(Spec):
    """Rates that kernels reach on the reference GPU; ``gemm`` and ``experts`` by precision, ``kv_bytes_per_s`` by bits of a
    KV element, ``all_reduce`` by GPUs of the TP group (bus bandwidth)."""

    reference_gpu: str
    gemm: dict[str, GemmKernel]
    experts: dict[str, GemmKernel]
    attention: AttentionKernel
    kv_bytes_per_s: dict[int, Quantity]
    elementwise: ElementwiseKernels
    all_reduce: dict[int, StreamKernel]


class DriverCosts(Spec):
    """Host seconds of the GPU driver's virtual memory calls.

    They create, map (with access) and unmap one physical page, or map one page index in all tensors by one batched call.
    """

    create_s: Quantity
    map_s: Quantity
    unmap_s: Quantity
    batched_map_s: Quantity


class Loader(Spec):
    """How weights come to a GPU: ``bytes_per_s`` to one, ``node_bytes_per_s`` to all of a node together (None: no limit)."""

    name: str
    bytes_per_s: Quantity
    node_bytes_per_s: Quantity | None = None


class AttentionVariant(Spec):
    """An attention kernel: how many times longer it takes than FlashAttention on contiguous KV.

    ``decode`` is by query heads a KV head; ``prefix_prefill`` is for prompt tokens that attend to cached ones.
    """

    name: str
    decode: dict[int, float] = Field(min_length=1)
    prefix_prefill: float = Field(gt=0)
    source: str

    def decode_factor(self, heads_per_kv_head: float) -> float:
        """Interpolated in the logarithm of both; beyond the ends of the table, its ends."""
        groups = sorted(self.decode)
        below = [group for group in groups if group <= heads_per_kv_head] or groups[:1]
        above = [group for group in groups if group >= heads_per_kv_head] or groups[-1:]
        low, high = below[-1], above[0]
        if low >= high:
            return self.decode[low if heads_per_kv_head >= low else high]
        part = math.log(heads_per_kv_head / low) / math.log(high / low)
        return math.exp((1 - part) * math.log(self.decode[low]) + part * math.log(self.decode[high]))
