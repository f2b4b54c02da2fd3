"""Matrix products, alone and two at once, and the small kernels around them: vLLM's operators where installed, else torch's.

``streams`` runs two products on two streams of one process and shows how much the first slows down. The SMs, the memory or
neither limits the pair: a product of many rows needs the tensor cores, one of few rows the memory. Engines share a GPU by time
slices or MPS (``contention``); streams show what the kernels alone do to each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fineserve_calibrate.probes.schema import Point, Prepared, Unavailable

if TYPE_CHECKING:
    from fineserve_calibrate.probes.torch_device import Call, TorchDevice


from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fineserve_calibrate.probes.torch_device import Call, TorchDevice


GROUP = 128  # int4 weights with one scale
EPSILON = 1e-5
HEAD_DIM = 128  # rope
HOPPER, ADA = (9, 0), (8, 9)
Product = tuple[Callable[["TorchDevice", int, int, int], "Call"], str]


def _bfloat16(device: TorchDevice, m: int, n: int, k: int) -> Call:
    x, weight = device.random(m, k), device.random(n, k)
    if device.on_cpu and device.ops is not None:
        packed = device.ops.create_onednn_mm(weight.t(), 32)
        return lambda: device.ops.onednn_mm(packed, x, None)
    return lambda: device.torch.nn.functional.linear(x, weight)


def _fp8(device: TorchDevice, m: int, n: int, k: int) -> Call:
    torch, eight = device.torch, device.torch.float8_e4m3fn
    x, weight = device.random(m, k, dtype=eight), device.random(n, k, dtype=eight).t()  # column-major
    scale = torch.ones(1, device=device.name)
    if device.ops is not None:
        return lambda: device.ops.cutlass_scaled_mm(x, weight, scale, scale, torch.bfloat16)
    return lambda: torch._scaled_mm(x, weight, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)


def _machete(device: TorchDevice, m: int, n: int, k: int) -> Call:
    from vllm.scalar_type import scalar_types

    kind, ops, sixteen = scalar_types.uint4, device.ops, device.torch.bfloat16
    x, scales, zeros = device.random(m, k), device.random(k // GROUP, n), device.random(k // GROUP, n)
    words = device.random_bits(k // 8, n).t().contiguous().t()
    weight = ops.machete_prepack_B(words, a_type=sixteen, b_type=kind, group_scales_type=sixteen)
    return lambda: ops.machete_mm(
        a=x, b_q=weight, b_type=kind, b_group_scales=scales, b_group_zeros=zeros, b_group_size=GROUP
    )


def _marlin(device: TorchDevice, m: int, n: int, k: int) -> Call:
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    x, place = device.random(m, k), device.torch.device(device.name, 0)
    scales = marlin_utils.marlin_permute_scales(device.random(k // GROUP, n), k, n, GROUP)
    weight = device.ops.gptq_marlin_repack(device.random_bits(k // 8, n), k, n, 4)
    empty, workspace = marlin_utils.marlin_make_empty(place), marlin_utils.marlin_make_workspace_new(place)
    return lambda: marlin_utils.apply_gptq_marlin_linear(
        input=x,
        weight=weight,
        weight_scale=scales,
        weight_zp=empty,
        workspace=workspace,
        wtype=scalar_types.uint4b8,
        output_size_per_partition=n,
        input_size_per_partition=k,
    )


def _cpu_int4(device: TorchDevice, m: int, n: int, k: int) -> Call:
    x, scales = device.random(m, k), device.random(k // GROUP, n)
    zeros, weight = device.random_bits(k // GROUP, n // 8), device.random_bits(n // 16, k * 2)
    return lambda: device.ops.cpu_gemm_wna16(
        input=x, q_weight=weight, scales=scales, zeros=zeros, bias=None, pack_factor=8, isa_hint="vec"
    )


def _product(device: TorchDevice, dtype: str) -> Product:
    """How this device multiplies by weights of ``dtype``, and what to call it."""
    if dtype == "bfloat16":
        own = device.on_cpu and device.ops is not None
        return _bfloat16, "vllm onednn_mm" if own else "torch linear"
    if dtype == "fp8":
        if device.on_cpu or device.capability < ADA:
            raise Unavailable("fp8 products need a GPU with fp8 tensor cores")
        return _fp8, "vllm cutlass_scaled_mm" if device.ops is not None else "torch _scaled_mm"
    if dtype != "int4_wo":
        raise Unavailable(f"no kernel multiplies by {dtype}")
    if device.ops is None:
        raise Unavailable("int4 weights need vLLM's kernels")
    if device.on_cpu:
        return _cpu_int4, "vllm cpu_gemm_wna16"
    return (_machete, "vllm machete_mm") if device.capability == HOPPER else (_marlin, "vllm marlin_gemm")


def int4_gemm(device: TorchDevice, point: Point) -> Prepared:
    """Prepare x (m, k) times 4-bit weights (k, n), by the kernel that the point names."""
    if device.on_cpu or device.ops is None:
        raise Unavailable("Machete and Marlin are vLLM's kernels on a GPU")
    if point["kernel"] == "machete" and device.capability != HOPPER:
        raise Unavailable("Machete needs a Hopper GPU")
    make = _machete if point["kernel"] == "machete" else _marlin
    m, n, k = (int(point[axis]) for axis in "mnk")
    buffers = device.buffers(n * k * WEIGHT_BYTES["int4_wo"] + 2 * m * (n + k))
    return device.timed([make(device, m, n, k) for _ in range(buffers)], f"vllm {point['kernel']}")


WEIGHT_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "int4_wo": 0.5}


def gemm(device: TorchDevice, point: Point) -> Prepared:
    """Prepare x (m, k) times a weight (k, n)."""
    m, n, k = (int(point[axis]) for axis in "mnk")
    make, name = _product(device, str(point["dtype"]))
    buffers = device.buffers(n * k * WEIGHT_BYTES[str(point["dtype"])] + 2 * m * (n + k))
    return device.timed([make(device, m, n, k) for _ in range(buffers)], name)


def _rms_norm(device: TorchDevice, tokens: int, width: int) -> Call:
    x, weight = device.random(tokens, width), device.random(width)
    if device.ops is not None:
        out = device.torch.empty_like(x)
        return lambda: device.ops.rms_norm(out, x, weight, EPSILON)
    return lambda: device.torch.nn.functional.rms_norm(x, (width,), weight, EPSILON)


def _add_rms_norm(device: TorchDevice, tokens: int, width: int) -> Call:
    x, residual, weight = device.random(tokens, width), device.random(tokens, width), device.random(width)
    if device.ops is not None:
        return lambda: device.ops.fused_add_rms_norm(x, residual, weight, EPSILON)
    return lambda: device.torch.nn.functional.rms_norm(x + residual, (width,), weight, EPSILON)


def _rope(device: TorchDevice, tokens: int, width: int) -> Call:
    if device.ops is None:
        raise Unavailable("rope needs vLLM's kernel")
    torch = device.torch
    keys = HEAD_DIM * max(1, width // HEAD_DIM // 5)  # a fifth of the heads, as 8 of 40
    query, key = device.random(tokens, width - keys), device.random(tokens, keys)
    positions = torch.randint(0, 4096, (tokens,), device=device.name)
    table = device.random(4096, HEAD_DIM)
    return lambda: device.ops.rotary_embedding(positions, query, key, HEAD_DIM, table, True)


def _silu_and_mul(device: TorchDevice, tokens: int, width: int) -> Call:
    torch, x = device.torch, device.random(tokens, width)
    if device.ops is not None:
        out = torch.empty(tokens, width // 2, device=device.name, dtype=x.dtype)
        return lambda: torch.ops._C.silu_and_mul(out, x)
    gate, up = x.chunk(2, dim=-1)
    return lambda: torch.nn.functional.silu(gate) * up


def _greedy(device: TorchDevice, tokens: int, width: int) -> Call:
    logits = device.random(tokens, width, dtype=device.torch.float32)
    return lambda: logits.argmax(dim=-1)


def _random(device: TorchDevice, tokens: int, width: int) -> Call:
    logits = device.random(tokens, width, dtype=device.torch.float32)
    noise = device.torch.empty_like(logits)
    return lambda: logits.softmax(dim=-1).div_(noise.exponential_()).argmax(dim=-1)


ELEMENTWISE: dict[str, tuple[Callable[[TorchDevice, int, int], Call], int, bool]] = {
    "rms_norm": (_rms_norm, 2, True),
    "add_rms_norm": (_add_rms_norm, 2, True),
    "rope": (_rope, 2, True),
    "silu_and_mul": (_silu_and_mul, 2, True),
    "greedy": (_greedy, 4, False),
    "random": (_random, 4, False),
}
"""Maker, bytes of an element, and whether vLLM has its own kernel."""


def elementwise(device: TorchDevice, point: Point) -> Prepared:
    """Prepare a norm, rotary embedding, activation or sampling. Random sampling is vLLM's without top-k or top-p."""
    tokens, width = int(point["tokens"]), int(point["width"])
    make, element_bytes, own = ELEMENTWISE[str(point["operation"])]
    buffers = device.buffers(2 * element_bytes * tokens * width)
    calls: list[Any] = [make(device, tokens, width) for _ in range(buffers)]
    return device.timed(calls, "vllm" if own and device.ops is not None else "torch")


ROWS = {"compute": 4096, "memory": 8}
WIDTH = 8192
CALLS = {"compute": 2, "memory": 16}
"""Products in a graph: about a millisecond on a large GPU."""
LONGER = 8  # how much longer the neighbour is at work


def _graph(device: TorchDevice, kernel: str, calls: int) -> Any:
    """Products in a captured graph, by weights that no cache holds."""
    rows, torch = ROWS[kernel], device.torch
    x = device.random(rows, WIDTH)
    weights = [device.random(WIDTH, WIDTH) for _ in range(device.buffers(2.0 * WIDTH * WIDTH))]
    out = torch.empty(rows, WIDTH, device=device.name, dtype=x.dtype)

    def product(weight: Any) -> Call:
        return lambda: torch.mm(x, weight, out=out)

    products = [product(weight) for weight in weights]
    for run in products:
        run()
    device.synchronize()
    return device.captured([products[place % len(products)] for place in range(calls)])


def streams(device: TorchDevice, point: Point) -> Prepared:
    """Prepare a product while its neighbour's products run on another stream; ``none``: alone.

    Raises Unavailable on the CPU.
    """
    if device.on_cpu:
        raise Unavailable("streams are a GPU's")
    kernel, neighbour = str(point["kernel"]), str(point["neighbour"])
    mine = _graph(device, kernel, CALLS[kernel])
    theirs = _graph(device, neighbour, LONGER * CALLS[neighbour]) if neighbour != "none" else None
    cuda, other = device.torch.cuda, device.torch.cuda.Stream()

    def once() -> float:
        start, end, done = (cuda.Event(enable_timing=True) for _ in range(3))
        if theirs is not None:
            with cuda.stream(other):
                theirs.replay()
                done.record(other)
        start.record()
        mine.replay()
        end.record()
        end.synchronize()
        if theirs is not None and done.query():
            raise Unavailable("the neighbour ended first")
        device.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / CALLS[kernel]

    return Prepared(lambda count: [once() for _ in range(count)], "torch mm")
