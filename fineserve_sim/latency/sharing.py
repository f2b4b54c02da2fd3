"""How much slower engines run that share a GPU: one law for each way of sharing.

A law takes the ``Demand`` of every engine that has work. It returns how many times longer the step of each lasts than alone
on the whole GPU. A law is a pure function: nothing depends on time, so steps between two changes of the batches may be merged
exactly.

    fluid        all engines at max(1, sum of compute, sum of bandwidth): ideal processor sharing, fitted to nothing
    time_slice   contexts take turns while kernels of several are resident, however little they need; a switch costs
    mps          kernels run side by side, and take turns for the compute units and the bandwidth that they need
    mps capped   an engine has its own SMs first (under_cap); bandwidth is shared, compute as far as the caps overlap
    in_turn      one step of each engine, as in one process: no step is longer, each waits for the others
    mig          the slice is the engine's own (a cluster has slices as GPUs: Gpu.board)

``turns`` is the model behind ``time_slice`` and ``mps``. An engine that wants a resource waits for the engines that want it at
that moment, and therefore wants it longer. An engine alone never waits. n engines that always want it take n times as long. In
between the law is softer than ``fluid``.

The numbers are fitted on part of the measurements that ``fineserve-calibrate sharing`` reads, and checked there against the
rest. A cluster asks ``LAWS``, with demands in hundredths, so that answers can be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

SWITCH_SHARE = 0.2
"""Time-slicing: what switching adds where one engine always has to wait. It is fitted with the engine's host time on the runs
with two models of kvcached's benchmark (Llama-3.1-8B on an A100; ovg-project/kvcached @ 7c66306a42bf). The optimum is flat
from 0.15 on. A vision model shows 0.11 with 3, 5 and 7 pods (nebuly-ai/nos)."""
MEMORY_SATURATION = 0.44
"""Share of the SMs from which on memory is as fast as with all: least squares on decodes and prefills of LLaMA-7B and 13B under
thread caps (A100; hao-ai-lab/MuxServe @ 223148033454)."""
ROUNDS = 100
CLOSE = 1e-12


class Demand(NamedTuple):
    """Needs of an engine's batch as fractions of its step alone on the whole GPU (``StepModel.demand``).

    * ``compute``, ``bandwidth``: the time in which compute units and memory bandwidth are busy.
    * ``resident``: the time in which any kernel is on the device.
    * ``sm_share``: the part of the SMs that the engine may take.
    * ``step_s``: how long the step lasts alone; ``turn_s``: how much longer after a step of another engine.

    An engine without work needs nothing.
    """

    compute: float
    bandwidth: float
    resident: float = 1.0
    sm_share: float = 1.0
    step_s: float = 1.0
    turn_s: float = 0.0

    @property
    def works(self) -> bool:
        return self.compute > 0.0 or self.bandwidth > 0.0


IDLE = Demand(0.0, 0.0, 0.0)


class Slice(NamedTuple):
    """Part of a GPU by MIG: of its SMs, and of its memory bandwidth."""

    compute: float
    bandwidth: float


Law = Callable[[Sequence[Demand]], list[float]]


def fluid(demands: Sequence[Demand]) -> list[float]:
    """Ideal processor sharing: all at the same pace."""
    pace = max(1.0, sum([need.compute for need in demands]), sum([need.bandwidth for need in demands]))
    return [pace] * len(demands)


def turns(needs: Sequence[float], switch_share: float = 0.0) -> list[float]:
    """How many times longer steps last whose fractions ``needs`` take turns.

    A switch adds ``switch_share`` where one engine always has to wait. An engine that needs nothing neither waits nor makes
    others wait.
    """
    wanting = sorted([need for need in needs if need > 0.0])
    if len(wanting) < 2:
        return [1.0] * len(needs)
    longer = _turns(tuple(wanting), switch_share)
    return [longer[need] if need > 0.0 else 1.0 for need in needs]


@lru_cache(2**16)
def _turns(needs: tuple[float, ...], switch_share: float) -> dict[float, float]:
    """By need. The part of the time in which an engine wants its turn grows with its own waiting: a fixed
    point, sought by Steffensen's steps from below."""
    stretch = [1.0] * len(needs)
    for _ in range(ROUNDS):
        present = [_present(need, longer) for need, longer in zip(needs, stretch)]  # noqa: B905 - compiled, a plain loop
        once, present = _waited(needs, present, switch_share)
        twice, _ = _waited(needs, present, switch_share)
        if all([abs(after - before) < CLOSE for before, after in zip(once, twice)]):  # noqa: B905, C419 - as below
            break
        stretch = [_extrapolated(start, first, second) for start, first, second in zip(stretch, once, twice)]  # noqa: B905 - compiled, a plain loop
    return {need: 1.0 + need * (longer - 1.0) for need, longer in zip(needs, twice, strict=True)}


def _waited(needs: Sequence[float], present: Sequence[float], switch_share: float) -> tuple[list[float], list[float]]:
    """How much longer each turn lasts behind the others that want one, one engine after the other, and the part of its step in
    which each is ``present`` then."""
    total, found, then = sum(present), [], []
    for need, mine in zip(needs, present):  # noqa: B905 - compiled, a plain loop
        rest = total - mine if total > mine else 0.0
        longer = (1.0 + rest) * (1.0 + switch_share * (rest if rest < 1.0 else 1.0))
        wants = _present(need, longer)
        total = rest + wants
        found.append(longer)
        then.append(wants)
    return found, then


def _present(need: float, longer: float) -> float:
    """The part of its step in which an engine wants a turn that lasts so many times longer."""
    return need * longer / (1.0 - need + need * longer)


def _extrapolated(start: float, once: float, twice: float) -> float:
    bend = twice - 2.0 * once + start
    return twice if bend == 0.0 else max(1.0, start - (once - start) ** 2 / bend)


def time_slice(demands: Sequence[Demand]) -> list[float]:
    """A kernel waits behind every context that has a kernel resident. While the hosts of the others work, it does not wait."""
    return turns([need.resident for need in demands], SWITCH_SHARE)


def in_turn(demands: Sequence[Demand]) -> list[float]:
    """A step of each engine that has work, one after the other, each ``turn_s`` longer.

    A short step waits for a neighbour's long one, and a long step for a short one.
    """
    working = [need.step_s + need.turn_s for need in demands if need.works]
    if len(working) < 2:
        return [1.0] * len(demands)
    round_s = sum(working)
    return [round_s / need.step_s if need.works else 1.0 for need in demands]


def mps(demands: Sequence[Demand]) -> list[float]:
    """Kernels side by side: an engine waits for compute units or for bandwidth, whichever is worse.

    Engines with a part of the SMs run at the pace of their cap, and compete for compute as far as the caps exceed the GPU.
    """
    alone = [under_cap(need) for need in demands]
    overlap = min(1.0, max(0.0, sum([need.sm_share for need in demands if need.works]) - 1.0))
    compute = turns([overlap * need.compute / pace for need, pace in zip(demands, alone, strict=True)])
    bandwidth = turns([need.bandwidth / pace for need, pace in zip(demands, alone, strict=True)])
    waits = zip(alone, compute, bandwidth, strict=True)
    return [pace * (for_compute if for_compute > for_bytes else for_bytes) for pace, for_compute, for_bytes in waits]


def under_cap(need: Demand, saturation: float = MEMORY_SATURATION) -> float:
    """How many times longer the step lasts on its part of the SMs, without a neighbour.

    Compute falls with the SMs, bandwidth only below ``saturation``; launches and host time stay.
    """
    if need.sm_share == 1.0:
        return 1.0
    return _on_part(need, need.sm_share, min(1.0, need.sm_share / saturation))


def _on_part(need: Demand, compute: float, bandwidth: float) -> float:
    return 1.0 + need.compute * (1.0 / compute - 1.0) + need.bandwidth * (1.0 / bandwidth - 1.0)


def mig(slices: Sequence[Slice]) -> Law:
    """Engines in slices of their own, one each."""

    def law(demands: Sequence[Demand]) -> list[float]:
        return [_on_part(need, part.compute, part.bandwidth) for need, part in zip(demands, slices, strict=True)]

    return law


class SharingLaw(NamedTuple):
    """A law as a cluster asks it.

    ``seen`` rounds a demand and its part of the SMs. ``paces`` maps the rounded demands of the engines of one GPU to their
    slowdowns, in the same order.

    Where a law seeks a fixed point, demands are rounded to hundredths. Slowdowns are right within a hundredth for each
    neighbour, and most answers are kept already. A neighbour whose demand hardly changed then changes no pace.
    """

    paces: Callable[[tuple[Any, ...]], Sequence[float]]
    seen: Callable[[Demand, float], Any]


def _step_alone(need: Demand, sm_share: float) -> Demand:
    """Three digits: a context that grew by a token is no news."""
    return Demand(1.0, 0.0, step_s=_digits(need.step_s), turn_s=_digits(need.turn_s)) if need.works else IDLE


def _digits(seconds: float) -> float:
    return float(f"{seconds:.3g}")


@lru_cache(2**16)
def _time_slice(seen: tuple[int, ...]) -> list[float]:
    return time_slice([Demand(0.0, 0.0, resident / 100.0) for resident in seen])


@lru_cache(2**16)
def _mps(seen: tuple[tuple[int, int, float], ...]) -> list[float]:
    return mps([Demand(compute / 100.0, bandwidth / 100.0, 1.0, sm_share) for compute, bandwidth, sm_share in seen])


LAWS: dict[str, SharingLaw] = {
    "fluid": SharingLaw(fluid, lambda need, sm_share: need),
    "time_slice": SharingLaw(_time_slice, lambda need, sm_share: int(100.0 * need.resident + 0.5)),
    "mps": SharingLaw(
        _mps, lambda need, sm_share: (int(100.0 * need.compute + 0.5), int(100.0 * need.bandwidth + 0.5), sm_share)
    ),
    "in_turn": SharingLaw(in_turn, _step_alone),
}
"""The laws by way of sharing, where demands alone decide."""
