"""The plan of the probes: grids of points, cut into parts of at most ``PART_LIMIT_S``.

The grids of matrix products and attention are products of axes, as the simulator's tables want them. Attention's batches and
contexts are powers of two. Points that would not fit into memory or time are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from fineserve_calibrate.probes.kernels import ROWS
from fineserve_calibrate.probes.parts import FULL, ONCE, QUICK, Effort, Part
from fineserve_calibrate.probes.schema import KEYS, Point, Value
from fineserve_calibrate.probes.transfers import CALLS

PART_LIMIT_S, ENGINE_LIMIT_S = 420.0, 270.0
"""Seconds after the first point, which may start an engine. With the point in flight, parts end within eight minutes."""
KIB, MIB, GIB = 2**10, 2**20, 2**30
Axis = Sequence[Value]
HEADS = ("q_heads", "kv_heads", "head_dim")
LAYOUTS = ("LBNHC", "LBHNC", "BLHNC")
"""vLLM's default, heads before tokens, and blocks outermost: a block of all layers is one piece, as a KV slab needs it."""
LAYOUT_TOKENS = 2**17  # over 32 layers of an 8B model 16 GiB


def grid(operator: str, keep: Callable[..., bool] = lambda **point: True, /, **axes: Axis) -> tuple[Point, ...]:
    """Combine the axes to every point that ``keep`` allows, in the operator's columns."""
    names = KEYS[operator]
    points = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return tuple({name: point[name] for name in names} for point in points if keep(**point))


def powers(first: int, last: int, factor: int = 2) -> tuple[int, ...]:
    """List first, first * factor, ... up to last."""
    values = [first]
    while values[-1] * factor <= last:
        values.append(values[-1] * factor)
    return tuple(values)


@dataclass(frozen=True, slots=True)
class Grids:
    """The axes of one kind of device, quick or full. Tokens, bytes and counts."""

    gemm: dict[str, Axis]
    gemm_dtypes: tuple[str, ...]
    gemm_flops: float
    heads: tuple[tuple[int, int, int], ...]
    prefill: dict[str, Axis]
    decode: dict[str, Axis]
    attention_tokens: int
    prefill_pairs: float
    tokens: Axis
    widths: dict[str, int]
    copy_bytes: Axis
    copies: tuple[tuple[str, str], ...]
    weight_bytes: Axis
    handle_bytes: Axis
    handles: Axis
    message_bytes: Axis
    decodes: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    prefixes: tuple[int, ...]
    context_tokens: int
    engines: tuple[tuple[str, str], ...]
    """(dtype, mode) of the engines whose steps are timed."""
    pairs: tuple[tuple[str, str], ...]
    """dtypes of two engines on the device at once."""
    int4: dict[str, Axis]
    """m, n and k of the products that Machete and Marlin are compared on; empty where neither runs."""
    layouts: dict[str, Axis]
    """batch and context of the decodes that KV layouts are compared on; empty likewise."""


_ACROSS = tuple(product(("host_to_device", "device_to_host"), ("pinned", "pageable")))
_WIDTHS_8B = {"rms_norm": 4096, "add_rms_norm": 4096, "rope": 5120, "silu_and_mul": 28672}
_WIDTHS_8B |= {"greedy": 128256, "random": 128256}
_WIDTHS_TINY = {"rms_norm": 256, "add_rms_norm": 256, "rope": 640, "silu_and_mul": 1024, "greedy": 1024, "random": 1024}
_BF16, _FP8, _INT4 = "bfloat16", "fp8", "int4_wo"
_M = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16384)

GPU_FULL = Grids(
    gemm={
        "m": _M,
        "n": (512, 1024, 2048, 4096, 6144, 8192, 14336, 28672),
        "k": (512, *powers(1024, 8192), 14336, 28672),
    },
    gemm_dtypes=(_BF16, _FP8, _INT4),
    gemm_flops=2e13,
    heads=((32, 8, 128), (64, 8, 128), (32, 32, 128), (32, 8, 64)),
    prefill={"batch": powers(1, 16), "new_tokens": powers(16, 16384), "cached_tokens": (0, 1024, 4096, 16384)},
    decode={"batch": powers(1, 256), "context": powers(16, 65536)},
    attention_tokens=2**20,
    prefill_pairs=2**29,
    tokens=powers(1, 16384, 4),
    widths=_WIDTHS_8B,
    copy_bytes=powers(4 * KIB, GIB, 4),
    copies=_ACROSS,
    weight_bytes=(64 * MIB, 256 * MIB, GIB, 4 * GIB),
    handle_bytes=(2 * MIB, 8 * MIB, 32 * MIB, 128 * MIB, GIB),
    handles=(1, 8, 64),
    message_bytes=powers(4 * KIB, 64 * MIB, 4),
    decodes=powers(1, 128),
    contexts=(128, 512, 2048, 8192),
    chunks=powers(64, 8192),
    prefixes=(0, 1024, 4096),
    context_tokens=100_000,
    engines=(
        (_BF16, "graphs"),
        (_BF16, "eager"),
        (_FP8, "graphs"),
        (_INT4, "graphs"),
        (_FP8, "eager"),
        (_INT4, "eager"),
    ),
    pairs=((_BF16, _BF16), (_BF16, _FP8), (_FP8, _FP8), (_BF16, _INT4), (_INT4, _INT4), (_FP8, _INT4)),
    int4={"m": (1, 8, 16, 32, 64, 128, 256, 1024, 4096), "n": (4096, 14336), "k": (4096, 14336)},
    layouts={"batch": powers(1, 64, 4), "context": powers(128, 8192, 4)},
)
GPU_QUICK = replace(
    GPU_FULL,
    gemm={"m": (1, 16, 64, 256, 1024, 4096), "n": (4096, 14336), "k": (4096, 14336)},
    gemm_flops=2e12,
    heads=((32, 8, 128),),
    prefill={"batch": (1, 4), "new_tokens": powers(64, 4096, 4), "cached_tokens": (0, 4096)},
    decode={"batch": powers(1, 64, 8), "context": powers(64, 16384, 4)},
    attention_tokens=2**18,
    prefill_pairs=2**26,
    tokens=(1, 64, 4096),
    copy_bytes=powers(64 * KIB, 64 * MIB, 8),
    weight_bytes=(256 * MIB,),
    handle_bytes=(2 * MIB, 128 * MIB),
    handles=(1, 8),
    message_bytes=powers(64 * KIB, 16 * MIB, 16),
    decodes=(1, 8, 32),
    contexts=(128, 512, 2048),
    chunks=(128, 512, 2048),
    prefixes=(0, 1024),
    context_tokens=20_000,
    engines=((_BF16, "eager"),),
    pairs=(),
    int4={"m": (16, 256), "n": (4096,), "k": (4096,)},
    layouts={"batch": (16,), "context": (2048,)},
)
CPU_FULL = Grids(
    gemm={"m": powers(1, 2048), "n": powers(256, 4096), "k": powers(256, 4096)},
    gemm_dtypes=(_BF16, _INT4, _FP8),
    gemm_flops=2e10,
    heads=((4, 2, 64), (8, 2, 64), (32, 8, 128)),
    prefill={"batch": (1, 2, 4, 8), "new_tokens": powers(16, 2048), "cached_tokens": (0, 512, 2048)},
    decode={"batch": powers(1, 64), "context": powers(16, 4096)},
    attention_tokens=2**17,
    prefill_pairs=2**22,
    tokens=powers(1, 4096, 4),
    widths=_WIDTHS_TINY,
    copy_bytes=powers(4 * KIB, 256 * MIB, 4),
    copies=(("host_to_host", "pageable"),),
    weight_bytes=(16 * MIB, 64 * MIB, 256 * MIB),
    handle_bytes=(2 * MIB,),
    handles=(1,),
    message_bytes=(MIB,),
    decodes=(1, 2, 4, 8, 16, 24, 32, 48, 64),
    contexts=(64, 256, 512, 1024, 2048),
    chunks=(16, 32, 64, 128, 256, 512, 1024, 2000),
    prefixes=(0, 256, 1024),
    context_tokens=70_000,
    engines=((_BF16, "eager"), (_INT4, "eager"), (_FP8, "eager")),
    pairs=((_BF16, _BF16), (_BF16, _INT4)),
    int4={},
    layouts={},
)
CPU_QUICK = replace(
    CPU_FULL,
    gemm={"m": powers(1, 1024, 4), "n": powers(256, 1024), "k": powers(256, 1024)},
    gemm_flops=3e9,
    heads=((4, 2, 64),),
    prefill={"batch": (1, 4), "new_tokens": powers(16, 1024, 4), "cached_tokens": (0, 512)},
    decode={"batch": powers(1, 64, 4), "context": powers(64, 1024, 4)},
    attention_tokens=2**15,
    prefill_pairs=2**20,
    tokens=(1, 16, 256),
    copy_bytes=powers(4 * KIB, 64 * MIB, 16),
    weight_bytes=(16 * MIB,),
    decodes=(1, 4, 16, 32, 64),
    contexts=(64, 512),
    chunks=(16, 64, 256, 1024),
    prefixes=(0, 512),
    context_tokens=20_000,
    engines=((_BF16, "eager"),),
    pairs=((_BF16, _BF16),),
)


def _step_points(grids: Grids, model: str, dtype: str, mode: str) -> tuple[Point, ...]:
    """Decodes alone, a prompt chunk alone, and both together."""
    head = {"model": [model], "dtype": [dtype], "kv_dtype": ["fp8" if dtype == "fp8" else "bfloat16"], "mode": [mode]}

    def fits(decodes: int, context: int, **rest: Value) -> bool:
        return decodes * context <= grids.context_tokens

    beside = [count for count in grids.decodes if count >= 4][::2]
    some = grids.chunks[1:-1:2] or grids.chunks
    return (
        *grid(
            "step", fits, **head, decodes=grids.decodes, context=grids.contexts, prefill_tokens=[0], cached_tokens=[0]
        ),
        *grid("step", **head, decodes=[0], context=[0], prefill_tokens=grids.chunks, cached_tokens=grids.prefixes),
        *grid(
            "step", fits, **head, decodes=beside, context=[512], prefill_tokens=some, cached_tokens=grids.prefixes[:2]
        ),
    )


def _contention_points(
    grids: Grids, model: str, sharing: str, pair: tuple[str, str], alone: tuple[str, ...]
) -> tuple[Point, ...]:
    """Each engine of a pair beside the other, decoding and prefilling; those in ``alone`` by themselves, too."""
    phases = ((grids.decodes[len(grids.decodes) // 2], 0), (0, grids.chunks[len(grids.chunks) // 2]))
    points: list[Point] = []
    for mine, other in dict.fromkeys((pair, pair[::-1])):
        for count, tokens in phases:
            beside = [(other, *phase) for phase in phases]
            for neighbour, others, other_tokens in [("none", 0, 0)] * (mine in alone) + beside:
                values: tuple[Value, ...] = (sharing, model, mine, neighbour, count, 512, tokens, others, other_tokens)
                points.append(dict(zip(KEYS["contention"], values, strict=True)))
    return tuple(points)


@dataclass(frozen=True, slots=True)
class Planner:
    """Parts of one kind of device, quick or full."""

    grids: Grids
    on_cpu: bool
    quick: bool
    model: str

    def _part(
        self,
        name: str,
        operator: str,
        points: tuple[Point, ...],
        quick_s: float,
        effort: Effort | None = None,
        start_s: float = 0.0,
    ) -> Part:
        """``quick_s``: limit of a quick part; ``start_s``: expected seconds until an engine is up."""
        effort = effort or (QUICK if self.quick else FULL)
        limit_s = quick_s if self.quick else ENGINE_LIMIT_S if start_s else PART_LIMIT_S
        expected_s = start_s + min(limit_s, len(points) * (1.6 * effort.target_s + 0.02))
        return Part(name, operator, points, effort, limit_s, expected_s)

    def kernels(self) -> Iterator[Part]:
        """Plan the operators of a layer."""
        grids = self.grids
        for dtype in grids.gemm_dtypes:
            points = grid("gemm", lambda m, n, k, **_: 2.0 * m * n * k <= grids.gemm_flops, dtype=[dtype], **grids.gemm)
            halves = [[p for p in points if (int(p["k"]) <= 4096) == small] for small in (True, False)]
            for place, half in enumerate([points] if self.quick else halves):
                if half:
                    yield self._part(f"gemm-{dtype}-{place}", "gemm", tuple(half), 8)
        for kv_dtype in (_BF16, _FP8):
            yield from self._attention(kv_dtype)
        points = ()
        for operation, width in grids.widths.items():
            points += grid("elementwise", operation=[operation], dtype=[_BF16], tokens=grids.tokens, width=[width])
        yield self._part("elementwise", "elementwise", points, 5)
        if not self.on_cpu:
            yield from self._compared()

    def _compared(self) -> Iterator[Part]:
        """Kernels and layouts against each other, and kernels beside each other."""
        grids, shape = self.grids, dict(zip(HEADS, ([value] for value in self.grids.heads[0]), strict=True))
        int4 = grid("int4_gemm", kernel=["machete", "marlin"], **grids.int4)
        yield self._part("int4-kernels", "int4_gemm", int4, 4)
        layouts = grid(
            "kv_layout",
            lambda batch, context, **_: batch * context <= LAYOUT_TOKENS,
            layout=LAYOUTS,
            kv_dtype=[_BF16, _FP8],
            **shape,
            **grids.layouts,
        )
        yield self._part("kv-layouts", "kv_layout", layouts, 4)
        neighbours = [*ROWS, "none"]
        yield self._part("streams", "streams", grid("streams", kernel=[*ROWS], neighbour=neighbours), 3)

    def _attention(self, kv_dtype: str) -> Iterator[Part]:
        grids = self.grids
        prefill: tuple[Point, ...] = ()
        decode: tuple[Point, ...] = ()

        def prefill_fits(batch: int, new_tokens: int, cached_tokens: int, **_: Value) -> bool:
            keys = new_tokens + cached_tokens
            return batch * keys <= grids.attention_tokens and batch * new_tokens * keys <= grids.prefill_pairs

        def decode_fits(batch: int, context: int, **_: Value) -> bool:
            return batch * context <= grids.attention_tokens

        for shape in grids.heads:
            head: dict[str, Axis] = {"dtype": [_BF16], "kv_dtype": [kv_dtype]}
            head |= {name: [value] for name, value in zip(HEADS, shape, strict=True)}
            prefill += grid("prefill_attention", prefill_fits, **head, **grids.prefill)
            decode += grid("decode_attention", decode_fits, **head, **grids.decode)
        yield self._part(f"prefill-attention-kv-{kv_dtype}", "prefill_attention", prefill, 4)
        yield self._part(f"decode-attention-kv-{kv_dtype}", "decode_attention", decode, 4)

    def transfers(self) -> Iterator[Part]:
        """Plan the copies, loads and driver calls."""
        grids = self.grids
        points: tuple[Point, ...] = ()
        for direction, memory in grids.copies:
            points += grid("copy", direction=[direction], host_memory=[memory], bytes=grids.copy_bytes)
        yield self._part("copy", "copy", points, 6)
        yield self._part("weight-load", "weight_load", grid("weight_load", bytes=grids.weight_bytes), 5)
        handles = grid(
            "vmm",
            lambda bytes, count, **_: bytes * count <= 8 * GIB,
            call=CALLS,
            bytes=grids.handle_bytes,
            count=grids.handles,
            load=["idle", "kernel"],
        )
        yield self._part("vmm", "vmm", handles, 6)
        messages = {"message_bytes": grids.message_bytes}
        yield self._part("all-reduce", "all_reduce", grid("all_reduce", dtype=[_BF16], gpus=[2, 4, 8], **messages), 4)
        yield self._part("point-to-point", "point_to_point", grid("point_to_point", **messages), 2)

    def engines(self) -> Iterator[Part]:
        """Plan the points on real engines. An engine that one part leaves running serves the next."""
        grids, repeated = self.grids, Effort(1, 10, 30, 0.15) if self.quick else Effort(1, 20, 60, 0.8)
        start_s = 12.0 if self.on_cpu else 40.0 if self.quick else 120.0
        for dtype, mode in grids.engines:
            name = f"{self.model}-{dtype}-{mode}"
            points = _step_points(grids, self.model, dtype, mode)
            yield self._part(f"step-{name}", "step", points, 20, repeated, start_s)
            phases = {"model": [self.model], "dtype": [dtype], "mode": [mode], "phase": ["import", "start"]}
            yield self._part(f"engine-start-{name}", "engine_start", grid("engine_start", **phases), 5, ONCE)
        beside = Effort(0, 15, 15, 0.0) if self.quick else Effort(0, 40, 40, 0.0)
        sharings = ["time_slicing"] if self.on_cpu else ["time_slicing", "mps"]
        measured: dict[str, set[str]] = {sharing: set() for sharing in sharings}
        for pair, sharing in product(grids.pairs, sharings):
            alone = tuple({*pair} - measured[sharing])
            measured[sharing] |= {*pair}
            points = _contention_points(grids, self.model, sharing, pair, alone)
            name = f"contention-{sharing}-{pair[0]}-{pair[1]}"
            yield self._part(name, "contention", points, 24, beside, start_s)
        if self.on_cpu or not self.quick:
            modes = ["eager"] if self.on_cpu else ["eager", "graphs"]
            points = grid("host_overhead", mode=modes, decodes=grids.decodes)
            yield self._part("host-overhead", "host_overhead", points, 8, repeated, start_s)


def plan(on_cpu: bool, quick: bool, model: str) -> list[Part]:
    """List every part, the most important first. In a full run the steps of real engines come first.

    ``model`` names the model whose steps are timed.
    """
    grids = (CPU_QUICK if quick else CPU_FULL) if on_cpu else (GPU_QUICK if quick else GPU_FULL)
    planner = Planner(grids, on_cpu, quick, model)
    small, engines = [*planner.kernels(), *planner.transfers()], list(planner.engines())
    first = 0 if quick else 6
    return [*engines[:first], *small, *engines[first:]]
