"""The items of a campaign, the most important first.

Pairs of engines come first: nothing else says what several engines on a GPU cost each other. On a GPU the items up to the steps
of one engine should fit into 25 minutes. The others are for more time. Expected seconds are guesses; the campaign corrects
them (``run.Pace``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, product

from fineserve_calibrate.probes.engines import Composition
from fineserve_calibrate.probes.parts import Effort
from fineserve_calibrate.probes.plan import LAYOUTS, MIB, Axis, grid
from fineserve_calibrate.probes.schema import Point
from fineserve_calibrate.probes.transfers import CALLS

from fineserve_evidence.campaign.items import Item, Scene, Seat, Sharing, Spot, Take, Trial

BF16, FP8, INT4 = "bfloat16", "fp8", "int4_wo"
STEPS, HOST, QUICK = Effort(1, 20, 40, 0.5), Effort(1, 20, 60, 0.5), Effort(3, 10, 60, 0.1)
PAGE = 2 * MIB
SHARINGS: tuple[Sharing, ...] = ("time_slice", "mps")
Loads = tuple[Composition | None, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Loads and points for one kind of device, with expected seconds."""

    decodes: tuple[Composition, ...]
    """The decode loads, from small to large. The middle one goes into groups of three."""
    prefill: Composition
    mode: str
    hold_s: float
    warm_s: float
    take_s: float
    import_s: float
    engine_s: float
    compiled_s: float
    step_s: float
    decode_counts: Axis
    contexts: Axis
    context_tokens: int
    chunks: Axis
    shapes: Mapping[str, float]
    """Trials of the part ``shapes``, with expected seconds."""
    layer_bytes: int
    """A layer of the model in 16 bits, without its norms."""

    @property
    def loads(self) -> tuple[Composition, ...]:
        return (*self.decodes, self.prefill)


GPU = Sizes(
    decodes=(Composition(1, 512, 0), Composition(32, 512, 0), Composition(256, 256, 0)),
    prefill=Composition(0, 0, 2048),
    mode="decode_graphs",
    hold_s=2.5,
    warm_s=0.5,
    take_s=3.7,
    import_s=20.0,
    engine_s=20.0,
    compiled_s=110.0,
    step_s=1.3,
    decode_counts=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    contexts=(256, 2048),
    context_tokens=80_000,
    chunks=(128, 512, 2048, 8192),
    shapes={"ipc": 15.0, "handles": 15.0, "nccl": 15.0, "gloo": 10.0, "graphs": 15.0, "asleep": 55.0},
    layer_bytes=208 * PAGE,
)
CPU = Sizes(
    decodes=(Composition(1, 128, 0), Composition(8, 128, 0)),
    prefill=Composition(0, 0, 256),
    mode="eager",
    hold_s=0.6,
    warm_s=0.1,
    take_s=1.5,
    import_s=15.0,
    engine_s=8.0,
    compiled_s=25.0,
    step_s=1.0,
    decode_counts=(1, 2, 4, 8, 16),
    contexts=(128, 512),
    context_tokens=10_000,
    chunks=(64, 256, 1024),
    shapes={"ipc": 0.1, "handles": 0.1, "nccl": 0.1, "gloo": 10.0, "graphs": 6.0, "asleep": 0.1},
    layer_bytes=2 * PAGE,
)


def plan(on_cpu: bool, model: str) -> list[Item]:
    """List every item, the most important first. ``model`` is the model whose engines run."""
    return list(Planner(CPU, model).small() if on_cpu else Planner(GPU, model).all())


@dataclass(frozen=True, slots=True)
class Planner:
    """Items of one kind of device."""

    sizes: Sizes
    model: str

    def all(self) -> Iterator[Item]:
        """List the items of a GPU."""
        two, mixed = (Seat(BF16), Seat(BF16)), (Seat(BF16), Seat(FP8), Seat(INT4))
        yield from self.pairs("time_slice", *two)
        yield from self.pairs("mps", *two)
        yield from self.shapes()
        for sharing in SHARINGS:
            yield from self.alike(sharing, Seat(BF16), 3)
        yield from self.pairs("time_slice", Seat(BF16), Seat(FP8))
        yield from self.pairs("mps", Seat(BF16, 50), Seat(BF16, 50))
        yield from self.pairs("mps", Seat(BF16, 70), Seat(BF16, 30))
        for sharing in SHARINGS:
            yield from self.threes(sharing, *mixed)
        yield from self.host(("graphs", "eager"))
        yield from self.driver((2, 32), (1, 8))
        yield from self.layouts((16, 64), (512, 2048))
        yield from self.steps(BF16, "graphs")
        yield from self.steps(BF16, "eager")
        yield from self.later()

    def later(self) -> Iterator[Item]:
        """List the items for more than 25 minutes."""
        yield from self.pairs("time_slice", Seat(BF16), Seat(INT4))
        yield from self.pairs("time_slice", Seat(BF16), Seat(BF16), mode="eager")
        for other in (FP8, INT4):
            yield from self.pairs("mps", Seat(BF16), Seat(other))
        yield from self.trials(15.0, 60.0, 180.0, 240.0)
        for dtype in (FP8, INT4):
            for mode in ("graphs", "eager"):
                yield from self.steps(dtype, mode)
        for sharing, (one, other) in product(SHARINGS, ((FP8, FP8), (INT4, INT4), (FP8, INT4))):
            yield from self.pairs(sharing, Seat(one), Seat(other))
        yield from self.pairs("mps", Seat(BF16, 50), Seat(FP8, 50))
        yield from self.pairs("mps", Seat(BF16, 70), Seat(FP8, 30))
        yield from self.pairs("mps", Seat(BF16, 30), Seat(FP8, 70))
        yield from self.pairs("mps", Seat(BF16), Seat(BF16), mode="eager")

    def small(self) -> Iterator[Item]:
        """List the same kinds of items for a CPU, few of each: a rehearsal."""
        yield from self.pairs("time_slice", Seat(BF16), Seat(BF16))
        yield from self.pairs("mps", Seat(BF16, 70), Seat(BF16, 30))
        yield from self.shapes()
        yield from self.alike("time_slice", Seat(BF16), 3)
        yield from self.pairs("time_slice", Seat(BF16), Seat(INT4))
        yield from self.host(("eager",))
        yield from self.driver((2,), (1,))
        yield from self.layouts((4,), (128,))
        yield from self.steps(BF16, "eager")
        yield from self.trials(15.0, 45.0, 75.0, 60.0)

    # --- engines side by side -----------------------------------------------------------------------------------------

    def _scene(
        self, kind: str, sharing: Sharing, seats: tuple[Seat, ...], takes: Sequence[Loads], mode: str
    ) -> Iterator[Item]:
        sizes = self.sizes
        used = tuple(load for load in sizes.loads if any(load in loads for loads in takes))
        scene = Scene(sharing, self.model, mode, seats, used)
        alike = len({seat.percent for seat in seats}) == 1 and seats[0].percent == 100
        engines = "+".join(seat.dtype if alike else f"{seat.dtype}@{seat.percent}" for seat in seats)
        name = f"{kind}-{sharing}-{engines}" + ("-eager" if mode == "eager" != sizes.mode else "")
        setup_s = sizes.import_s + sizes.engine_s * len(seats)
        for loads in takes:
            yield Item(name, Take(scene, loads, sizes.hold_s, sizes.warm_s), sizes.take_s, name, setup_s)

    def pairs(self, sharing: Sharing, first: Seat, second: Seat, mode: str = "") -> Iterator[Item]:
        """List each engine alone under each load, and each load against each."""
        loads = self.sizes.loads
        takes: list[Loads] = [(load, None) for load in loads]
        takes += [] if first == second else [(None, load) for load in loads]
        takes += combinations_with_replacement(loads, 2) if first == second else product(loads, loads)
        yield from self._scene("pairs", sharing, (first, second), takes, mode or self.sizes.mode)

    def alike(self, sharing: Sharing, seat: Seat, count: int) -> Iterator[Item]:
        """List ``count`` engines of a kind under the same load, and one that prefills beside decodes.

        The largest decode is left out: it would not fit on 80 GB.
        """
        decodes, prefill = self.sizes.decodes[:2], self.sizes.prefill
        takes: list[Loads] = [(load,) * count for load in (*decodes, prefill)]
        takes.append((prefill, *[decodes[-1]] * (count - 1)))
        yield from self._scene("threes", sharing, (seat,) * count, takes, self.sizes.mode)

    def threes(self, sharing: Sharing, *seats: Seat) -> Iterator[Item]:
        """List loads of three engines that differ: all decode, all prefill, and both at once."""
        small, middle, *_, large = self.sizes.decodes
        prefill = self.sizes.prefill
        takes: list[Loads] = [(load,) * 3 for load in self.sizes.loads]
        takes += [(middle, middle, prefill), (prefill, middle, middle), (middle, prefill, prefill)]
        takes.append((large, small, prefill))
        yield from self._scene("threes", sharing, seats, takes, self.sizes.mode)

    def trials(self, check_s: float, demo_s: float, replay_s: float, overhead_s: float) -> Iterator[Item]:
        """List the trials of the runtime."""
        expected = {"check": check_s, "demo": demo_s, "replay": replay_s, "overhead": overhead_s}
        for name, seconds in expected.items():
            yield Item("runtime", Trial(name, self.model), seconds)

    # --- two shapes over one set of weights ---------------------------------------------------------------------------

    def shapes(self) -> Iterator[Item]:
        """List what two shapes of a model need of a device: trials, and a layer unmapped, mapped and copied.

        The engine comes last: it takes the longest and may not start.
        """
        *trials, last = [
            Item("shapes", Trial(name, self.model), seconds) for name, seconds in self.sizes.shapes.items()
        ]
        yield from trials
        yield from self.layer()
        yield last

    def layer(self) -> Iterator[Item]:
        """List the calls that take a layer's memory away and give it back, as pages and as one handle, and its copies."""
        size = self.sizes.layer_bytes
        for each, count in ((PAGE, size // PAGE), (size, 1)):
            calls: dict[str, Axis] = {"call": ("map", "set_access", "unmap"), "load": ("idle", "kernel")}
            yield from self._spots("shapes", "vmm", grid("vmm", **calls, bytes=[each], count=[count]), QUICK, 1.5)
        ways: dict[str, Axis] = {"direction": ("device_to_host", "host_to_device"), "host_memory": ["pinned"]}
        yield from self._spots("shapes", "copy", grid("copy", **ways, bytes=[size]), QUICK, 2.0)

    # --- one engine, kernels, the driver ------------------------------------------------------------------------------

    def _spots(
        self, part: str, operator: str, points: Sequence[Point], effort: Effort, each_s: float, setup_s: float = 0.0
    ) -> Iterator[Item]:
        for point in points:
            yield Item(part, Spot(operator, point, effort), each_s, part if setup_s else "", setup_s)

    def _start_s(self, mode: str) -> float:
        return self.sizes.compiled_s if mode == "graphs" else self.sizes.import_s + self.sizes.engine_s

    def steps(self, dtype: str, mode: str) -> Iterator[Item]:
        """List steps by batch, by prompt chunk, and a chunk beside decodes."""
        sizes = self.sizes
        head: dict[str, Axis] = {"model": [self.model], "dtype": [dtype], "mode": [mode]}
        head["kv_dtype"] = [FP8 if dtype == FP8 else BF16]
        points = grid(
            "step",
            lambda decodes, context, **_: decodes * context <= sizes.context_tokens,
            **head,
            decodes=sizes.decode_counts,
            context=sizes.contexts,
            prefill_tokens=[0],
            cached_tokens=[0],
        )
        points += grid("step", **head, decodes=[0], context=[0], prefill_tokens=sizes.chunks, cached_tokens=[0])
        middle = sizes.decodes[1].decodes
        beside: dict[str, Axis] = {"decodes": [middle], "context": [sizes.contexts[0]]}
        points += grid("step", **head, **beside, prefill_tokens=sizes.chunks[1:3], cached_tokens=[0])
        part = f"steps-{dtype}-{mode}"
        yield from self._spots(part, "step", points, STEPS, sizes.step_s, self._start_s(mode))

    def host(self, modes: Sequence[str]) -> Iterator[Item]:
        """List steps of a model with one small layer: the host's part of a step by running sequences."""
        for mode in modes:
            points = grid("host_overhead", mode=[mode], decodes=self.sizes.decode_counts)
            start_s = self._start_s("eager")  # one layer compiles fast
            yield from self._spots(f"host-{mode}", "host_overhead", points, HOST, self.sizes.step_s, start_s)

    def driver(self, sizes_mib: Sequence[int], counts: Axis) -> Iterator[Item]:
        """List VMM calls of the driver, idle and under products."""
        handles = [MIB * size for size in sizes_mib]
        points = grid("vmm", call=CALLS, bytes=handles, count=counts, load=["idle", "kernel"])
        yield from self._spots("driver", "vmm", points, QUICK, 0.4)

    def layouts(self, batches: Axis, contexts: Axis) -> Iterator[Item]:
        """List paged decode attention in each layout of the KV cache."""
        shape: dict[str, Axis] = {"q_heads": [32], "kv_heads": [8], "head_dim": [128], "kv_dtype": [BF16, FP8]}
        points = grid("kv_layout", layout=LAYOUTS, **shape, batch=batches, context=contexts)
        yield from self._spots("layouts", "kv_layout", points, QUICK, 0.5)
