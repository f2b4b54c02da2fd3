"""The engines of a scene: processes of our own, started once, with loads that begin and end at the same instants.

``steady`` picks the steps that count: those during which every other engine was at work, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from fineserve_calibrate.probes.engine_points import KV_OF
from fineserve_calibrate.probes.engine_worker import ROUND
from fineserve_calibrate.probes.engines import Composition, EngineProcess, EngineSpec, ProbedModel, settings_with
from fineserve_calibrate.probes.nvidia import Environment
from fineserve_calibrate.probes.schema import Unavailable

from fineserve_evidence.campaign.items import Scene, Seat

PREPARE_LIMIT_S = 90.0
LEAD_S = 0.05
"""From the moment all engines are ready to the common start: the line that tells them must have arrived."""
SPARE = 1.15
"""KV memory over what the loads fill: blocks are rounded up, and a new round begins before the old one is gone."""
LEAST_KV_BYTES = 2**28
KEPT_LOG = 20_000  # characters of an engine's log
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def kv_bytes(scene: Scene, seat: Seat, model: ProbedModel) -> int:
    """Compute the KV memory in which each load of the scene fits without preemption."""
    config = model.config
    token_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    token_bytes *= 1 if KV_OF[seat.dtype] == "fp8" else 2
    tokens = max(load.decodes * (load.context + ROUND) + 4 * load.prefill_tokens for load in scene.loads)
    return max(LEAST_KV_BYTES, int(SPARE * tokens * token_bytes))


def settings(scene: Scene, place: int, model: ProbedModel, on_cpu: bool, mps: Environment) -> dict[str, Any]:
    """Make the argument of ``worker`` for one seat: configuration, vLLM arguments and environment."""
    seat = scene.seats[place]
    decodes = sorted({load.decodes for load in scene.loads if load.decodes})
    budget = max(load.prefill_tokens for load in scene.loads) or 2048
    longest = max(max(load.context + 2 * ROUND, load.prefill_tokens + 1) for load in scene.loads)
    arguments: dict[str, Any] = {
        "kv_cache_memory_bytes": kv_bytes(scene, seat, model),
        "max_num_seqs": max([8, *decodes]),
        "max_num_batched_tokens": max([budget, *decodes]),
        "max_model_len": -(-longest // 32) * 32,
    }
    if not on_cpu:  # vLLM compares this fraction of the device with what is free; the KV memory is given
        arguments |= {"gpu_memory_utilization": 0.05}
    if scene.mode == "decode_graphs":
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": decodes or [1]}
        arguments |= {"compilation_config": graphs}
    share = ((PERCENTAGE, str(seat.percent)),) if seat.percent != 100 else ()
    spec = EngineSpec(model.name, seat.dtype, KV_OF[seat.dtype], scene.mode, place, (*mps, *share))
    return settings_with(arguments, spec, model, on_cpu)


class Member(EngineProcess):
    """One engine. Methods raise Unavailable as in ``EngineProcess``."""

    worker = "fineserve_evidence.campaign.worker"
    start_limit_s = 240.0

    def prepare(self, load: Composition) -> None:
        """Begin to get ready. ``ready`` waits for the end."""
        self.tell({"decodes": load.decodes, "context": load.context, "prefill_tokens": load.prefill_tokens})

    def ready(self) -> None:
        self.answer(PREPARE_LIMIT_S)

    def run(self, from_s: float, until_s: float) -> None:
        """Run the prepared load. ``steps`` waits for its end."""
        self.tell({"from": from_s, "until": until_s})

    def hang_up(self) -> None:
        """Tell the process to end, without waiting for it."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()


class Crew:
    """Running engines, one a seat. When one fails, the ends of all logs are kept in ``logs``.

    Raises Unavailable when one does not start. Then none is left.
    """

    def __init__(self, seats: Sequence[dict[str, Any]], logs: Path) -> None:
        self._members: list[Member] = []
        self._logs = logs
        try:
            with self._logged():
                for each in seats:
                    self._members.append(Member(each))
                for member in self._members:  # one after the other: an engine looks at the memory that is free
                    member.started()
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Keeps what the engines printed when one of them fails."""
        try:
            yield
        except Unavailable:
            self._logs.mkdir(parents=True, exist_ok=True)
            for place, member in enumerate(self._members):
                (self._logs / f"engine-{place}.log").write_text(member.log()[-KEPT_LOG:], encoding="utf-8")
            raise

    def take(self, loads: Sequence[Composition | None], hold_s: float) -> tuple[float, list[Steps]]:
        """Run the loads for ``hold_s`` from a common instant on. Return that instant, and the steps of each engine with a load.

        Raises Unavailable when an engine fails. Then the crew cannot be used any more.
        """
        active = [(member, load) for member, load in zip(self._members, loads, strict=True) if load]
        with self._logged():
            for member, load in active:
                member.prepare(load)
            for member, _ in active:
                member.ready()
            from_s = time.monotonic() + LEAD_S
            for member, _ in active:
                member.run(from_s, from_s + hold_s)
            return from_s, [member.steps() for member, _ in active]

    def close(self) -> None:
        """End all processes at the same time, and wait until they have given back their memory."""
        for member in self._members:
            member.hang_up()
        for member in self._members:
            member.close()
        self._members = []


Steps = Sequence[tuple[float, float]]
"""(end, seconds) of each step, ascending, on one clock."""
ROUNDING_S = 1e-6


def stretches(steps: Steps) -> list[tuple[float, float]]:
    """Find (start, end) of the spans in which one step follows the other without a pause."""
    spans: list[tuple[float, float]] = []
    for end, seconds in steps:
        start = end - seconds
        if spans and start <= spans[-1][1] + ROUNDING_S:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return spans


def steady(engines: Sequence[Steps], from_s: float, until_s: float) -> list[list[float]]:
    """Collect the seconds of each engine's steps that count.

    A step counts when it lies wholly between ``from_s`` and ``until_s``, and wholly within stretches of every other engine.
    While it ran, the other engines ran their loads, too.
    """
    spans = [stretches(steps) for steps in engines]
    return [
        [
            seconds
            for end, seconds in steps
            if end - seconds >= from_s
            and end <= until_s
            and all(_within(end - seconds, end, other) for place, other in enumerate(spans) if place != mine)
        ]
        for mine, steps in enumerate(engines)
    ]


def _within(start: float, end: float, spans: Sequence[tuple[float, float]]) -> bool:
    return any(first - ROUNDING_S <= start and end <= last + ROUNDING_S for first, last in spans)


def statistics(seconds: Sequence[float]) -> dict[str, float | int]:
    """Summarise positive times: median, mean, 90th percentile, spread (interquartile range / median) and number.

    When engines take turns, the median of a short step says little of its throughput. The mean does.
    """
    values = np.array(seconds)
    low, median, high, late = np.quantile(values, [0.25, 0.5, 0.75, 0.9]).tolist()
    return {
        "latency_s": median,
        "mean_s": float(values.mean()),
        "p90_s": late,
        "spread": (high - low) / median,
        "repeats": len(values),
    }
