"""Before an engine serves: a few steps to warm it up, timed, as the first rows of its step-time model."""

from __future__ import annotations

import itertools
from dataclasses import replace

from fineserve_runtime.engines.api import EngineHandle, EngineHost, EngineListener, Sampling, StepReport, Submission
from fineserve_runtime.step_times import MeasuredStep

_ROUNDS = 3
_DECODES = 4
_TIMEOUT_S = 300.0


class Relay:
    """A listener whose listener may change; ``aside``: that of single engines, which warm up."""

    def __init__(self) -> None:
        self.to: EngineListener | None = None
        self.aside: dict[int, EngineListener] = {}

    def on_step(self, report: StepReport) -> None:
        listener = self.aside.get(report.engine, self.to)
        if listener is not None:
            listener.on_step(report)

    def on_died(self, engine: int, reason: str, lost: tuple[int, ...], crashed: bool = False) -> None:
        listener = self.aside.get(engine, self.to)
        if listener is not None:
            listener.on_died(engine, reason, lost, crashed)


class _Steps:
    """Keeps the steps of an engine, and how it died."""

    def __init__(self) -> None:
        self.steps: list[MeasuredStep] = []
        self.death: str | None = None

    def on_step(self, report: StepReport) -> None:
        if report.prefill_tokens or report.decodes:
            self.steps.append(MeasuredStep(report.prefill_tokens, report.decodes, report.ended_s - report.started_s))

    def on_died(self, engine: int, reason: str, lost: tuple[int, ...], crashed: bool = False) -> None:
        self.death = reason


def measure(host: EngineHost, relay: Relay) -> dict[str, tuple[MeasuredStep, ...]]:
    """Rows by model name; each engine is measured alone. Steps of an instance count, steps of the pipeline beside it not."""
    engines = sorted(host.engines.values(), key=lambda handle: not handle.config.borrows)
    return {handle.config.name: measure_engine(handle, relay) for handle in engines}


def measure_engine(handle: EngineHandle, relay: Relay) -> tuple[MeasuredStep, ...]:
    """Rows of an engine that serves nothing yet. The first round is not kept: caches and kernels are cold. Raises
    RuntimeError when the engine dies of it."""
    ids = itertools.count(10**9)  # far from those of requests
    rows: list[MeasuredStep] = []
    try:
        for round_ in range(1 + _ROUNDS):
            listener = relay.aside[handle.id] = _Steps()
            _work(handle, ids, Sampling(logprobs=None if round_ else 1))
            if listener.death is not None:
                raise RuntimeError(f"{handle.config.name} died while it warmed up: {listener.death}")
            if round_:
                rows += listener.steps
    finally:
        del relay.aside[handle.id]
    return tuple(rows)


def _work(handle: EngineHandle, ids: itertools.count[int], sampling: Sampling) -> None:
    """Prompts of three lengths one by one, then some decodes together."""
    config = handle.config
    longest = min(config.max_batched_tokens, config.max_model_len - 2)
    for length in sorted({max(1, longest // 8), max(1, longest // 2), longest}):
        _ask(handle, next(ids), length, replace(sampling, max_tokens=1))
        _finish(handle)
    for _ in range(min(_DECODES, config.max_sequences)):
        tokens = min(8, config.max_model_len - longest // 8 - 1)
        _ask(handle, next(ids), max(1, longest // 8), replace(sampling, max_tokens=tokens))
    _finish(handle)


def _ask(handle: EngineHandle, request_id: int, length: int, sampling: Sampling) -> None:
    prompt = tuple(3 + (7 * i + request_id) % 97 for i in range(length))
    handle.submit(Submission(request_id, prompt, replace(sampling, ignore_eos=True)))


def _finish(handle: EngineHandle) -> None:
    if not handle.drain(_TIMEOUT_S):
        raise RuntimeError(f"{handle.config.name} did not finish its warm-up in {_TIMEOUT_S:g} s")
