"""What the catalog knows: GPUs, models, precisions, generations of engines."""

from __future__ import annotations

from docs.generate.markdown import table
from fineserve_sim import catalog
from fineserve_sim.catalog import GpuSpec, ModelSpec, Quantity
from fineserve_sim.latency.tables import DEVICES

NUMBERS = ("memory GiB", "BF16 TFLOP/s", "FP8 TFLOP/s", "bandwidth TB/s", "$ an hour")


def gpus() -> str:
    prices = catalog.list_prices().usd_per_gpu_hour
    rows = [
        (
            f"`{gpu.name}`",
            f"{gpu.memory_gib:g}",
            f"{gpu.bf16_flops_per_s / 1e12:.0f}",
            f"{gpu.fp8_flops_per_s / 1e12:.0f}" if gpu.fp8_flops_per_s else "none",
            f"{gpu.memory_bytes_per_s / 1e12:.2f}",
            f"{prices[gpu.name]:.2f}" if gpu.name in prices else "none",
            "measured" if gpu.efficiency == "measured" else "scaled by its peaks",
            _tables(gpu),
        )
        for gpu in catalog.gpus().values()
    ]
    return table(("GPU", *NUMBERS, "kernel rates", "latency tables"), rows, right=NUMBERS)


def _tables(gpu: GpuSpec) -> str:
    """Whose latency tables make the step times."""
    if gpu.name in DEVICES:
        return "its own"
    return f"of `{gpu.tables_from}`, scaled" if gpu.tables_from else "none: rooflines"


def models() -> str:
    half = catalog.precision("W16A16")
    rows = [
        (
            f"`{model.name}`",
            f"{catalog.parameters(model) / 1e9:.2f} B",
            f"{catalog.active_parameters(model) / 1e9:.2f} B" if model.experts else "all",
            model.layers,
            f"{catalog.kv_token_bytes(model, half, 1) / 1024:g}",
            _attention(model),
            f"`{model.checkpoint}`",
            f"{model.max_context_tokens:,}",
        )
        for model in catalog.models().values()
    ]
    numbers = ("parameters", "active", "layers", "KV KiB a token, 16 bit")
    more = ("attention", "published in", "longest context")
    return table(("model", *numbers, *more), rows, right=(*numbers, more[-1]))


def _attention(model: ModelSpec) -> str:
    """The kinds of attention of its layers, where they are not all full."""
    if model.latent:
        return "latent, sparse" if model.latent.index_tokens else "latent"
    if model.window:
        return f"{model.window.layers} layers see {model.window.tokens:,} tokens"
    return f"{model.linear.layers} layers linear" if model.linear else "full"


def precisions() -> str:
    rows = [
        (
            f"`{one.name}`",
            ", ".join(f"`{alias}`" for alias in one.aliases),
            f"{one.effective_weight_bits:g}",
            one.activation_bits,
            one.kv_bits,
            one.tensor_core,
        )
        for one in catalog.precisions().values()
    ]
    return table(("precision", "also called", "bits a weight", "activation", "KV", "computes in"), rows)


def deployments() -> str:
    """Host times by generation, with what they rest on."""
    rows = []
    for name, one in catalog.deployments().items():
        floors = {f"{floor.value * 1e3:g}" for floor in (one.host_floors or {}).values()}
        rows.append((
            f"`{name}`",
            _ms(one.overhead_s),
            _ms(one.sequence_s) if one.sequence_s else "-",
            " to ".join(sorted({min(floors), max(floors)})) if floors else "none: CUDA graphs",
            one.overhead_s.kind,
            one.overhead_s.source,
        ))  # fmt: skip
    return table(("deployment", "ms a step", "ms a sequence", "floor, ms", "kind", "source"), rows)


def loaders() -> str:
    """How fast weights come to a GPU; a source is said once."""
    rows, said = [], ""
    for name, one in catalog.loaders().items():
        node = f"{one.node_bytes_per_s.value / 1e9:g}" if one.node_bytes_per_s else "-"
        rate = one.bytes_per_s
        source, said = "the same" if rate.source == said else rate.source, rate.source
        rows.append((f"`{name}`", f"{rate.value / 1e9:g}", node, rate.kind, source))
    return table(("loader", "GB/s to a GPU", "GB/s to a node", "kind", "source"), rows)


def _ms(time: Quantity) -> str:
    return f"{time.value * 1e3:g}"
