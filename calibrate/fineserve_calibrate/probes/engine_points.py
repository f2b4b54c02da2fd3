"""Points on a real vLLM engine: start, host overhead, steps, and steps beside another engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fineserve_calibrate.probes.engine_worker import ROUND
from fineserve_calibrate.probes.engines import ONE_LAYER, Composition, EngineProcess, EngineSpec
from fineserve_calibrate.probes.nvidia import Environment, start_mps
from fineserve_calibrate.probes.schema import Point, Prepared, Unavailable

if TYPE_CHECKING:
    from fineserve_calibrate.probes.torch_device import TorchDevice

HOLD_S = 1.0
LONGEST_HOLD_S = 16.0
KV_OF = {"bfloat16": "bfloat16", "fp8": "fp8", "int4_wo": "bfloat16"}
"""The KV dtype that goes with a weight dtype, unless a point names one."""


def _engines(device: TorchDevice, *specs: EngineSpec) -> list[EngineProcess]:
    if not device.has_vllm:
        raise Unavailable("vllm is not installed")
    device.free()
    return device.engines.get(*specs)


def _steps(device: TorchDevice, spec: EngineSpec, wanted: Composition, name: str) -> Prepared:
    if max(wanted.context, wanted.cached_tokens + wanted.prefill_tokens) + ROUND > device.engines.longest(spec):
        raise Unavailable(f"longer than the {device.engines.longest(spec)} tokens of {spec.model}")
    (engine,) = _engines(device, spec)

    def sample(count: int) -> list[float]:
        engine.ask(wanted, count)
        with _discarded_if_lost(device, spec):
            return [seconds for _, seconds in engine.steps()][:count]

    return Prepared(sample, name)


@contextmanager
def _discarded_if_lost(device: TorchDevice, *specs: EngineSpec) -> Iterator[None]:
    """An engine that fails a point is started anew for the next."""
    try:
        yield
    except Unavailable:
        for spec in specs:
            device.engines.discard(spec)
        raise


def _name(device: TorchDevice) -> str:
    return f"vllm {device.identity.vllm} engine"


def step(device: TorchDevice, point: Point) -> Prepared:
    """Prepare one step of an engine."""
    model, dtype, kv_dtype, mode = (str(point[name]) for name in ("model", "dtype", "kv_dtype", "mode"))
    names = ("decodes", "context", "prefill_tokens", "cached_tokens")
    wanted = Composition(*(int(point[name]) for name in names))
    return _steps(device, EngineSpec(model, dtype, kv_dtype, mode), wanted, _name(device))


def host_overhead(device: TorchDevice, point: Point) -> Prepared:
    """Prepare one decode step of an engine with one small layer: its time is the host's."""
    spec = EngineSpec(ONE_LAYER.name, "bfloat16", "bfloat16", str(point["mode"]))
    return _steps(device, spec, Composition(int(point["decodes"]), 32, 0), _name(device))


def engine_start(device: TorchDevice, point: Point) -> Prepared:
    """Start an engine and take its seconds. Caches of earlier starts (vLLM's, Python's) help, as they do in service."""
    dtype = str(point["dtype"])
    spec = EngineSpec(str(point["model"]), dtype, KV_OF[dtype], str(point["mode"]))
    (engine,) = _engines(device, spec)
    seconds = engine.import_s if point["phase"] == "import" else engine.start_s
    return Prepared(lambda count: [seconds] * count, _name(device))


def _shared(device: TorchDevice, sharing: str) -> Environment:
    if sharing == "time_slicing":
        return ()
    if device.on_cpu:
        raise Unavailable("MPS is NVIDIA's")
    if device.mps is None:
        device.mps = start_mps()
    return device.mps


def contention(device: TorchDevice, point: Point) -> Prepared:
    """Prepare one step of an engine while another engine runs its own steps; alone where ``neighbour`` is none."""
    environment = _shared(device, str(point["sharing"]))
    dtype, other, model = (str(point[name]) for name in ("dtype", "neighbour", "model"))
    mine = Composition(*(int(point[name]) for name in ("decodes", "context", "prefill_tokens")))
    specs = [EngineSpec(model, dtype, KV_OF[dtype], "eager", 0, environment)]
    if other == "none":
        return _steps(device, specs[0], mine, _name(device))
    decodes, prefill = (int(point[name]) for name in ("neighbour_decodes", "neighbour_prefill_tokens"))
    theirs = Composition(decodes, mine.context, prefill)
    specs.append(EngineSpec(model, other, KV_OF[other], "eager", 1, environment))
    first, second = _engines(device, *specs)
    with _discarded_if_lost(device, *specs):
        _both(first, mine, second, theirs, 0.0)  # prefixes get into the caches

    def sample(count: int) -> list[float]:
        with _discarded_if_lost(device, *specs):
            return side_by_side(lambda hold_s: _both(first, mine, second, theirs, hold_s), count)

    return Prepared(sample, _name(device))


Steps = list[tuple[float, float]]


def _both(
    first: EngineProcess, mine: Composition, second: EngineProcess, theirs: Composition, hold_s: float
) -> tuple[Steps, Steps]:
    second.ask(theirs, 1, hold_s)
    first.ask(mine, 1, hold_s)
    return first.steps(), second.steps()


def side_by_side(run: Callable[[float], tuple[Steps, Steps]], count: int) -> list[float]:
    """Collect the seconds of ``count`` steps of the first engine that lie wholly within the time in which both ran.

    ``run`` lets both work for some seconds and gives (end, seconds) of their steps. It is called for longer until there are
    enough steps. Raises Unavailable when ``LONGEST_HOLD_S`` is too short.
    """
    hold_s = HOLD_S
    while hold_s <= LONGEST_HOLD_S:
        mine, theirs = run(hold_s)
        since, until = theirs[0][0] - theirs[0][1], theirs[-1][0]
        both = [seconds for end, seconds in mine if end - seconds >= since and end <= until]
        if len(both) >= count:
            return both
        hold_s *= 2
    raise Unavailable(f"fewer than {count} steps side by side in {LONGEST_HOLD_S:g} s")
