"""Before an engine serves: a few steps to warm it up, timed, as the first rows of its step-time model."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

from fineserve_runtime.engines.api import EngineHandle, EngineHost, EngineListener, Sampling, StepReport, Submission
from fineserve_runtime.step_times import MeasuredStep

_ROUNDS = 3
_DECODES = 4
_TIMEOUT_S = 300.0


class Relay:
    """A listener whose listener may change."""

    def __init__(self) -> None:
        self.to: EngineListener | None = None

    def on_step(self, report: StepReport) -> None:
        if self.to is not None:
            self.to.on_step(report)

    def on_died(self, engine: int, reason: str, lost: tuple[int, ...], crashed: bool = False) -> None:
        if self.to is not None:
            self.to.on_died(engine, reason, lost, crashed)


class _Steps:
    """Keeps the steps of every engine."""

    def __init__(self) -> None:
        self.steps: dict[int, list[MeasuredStep]] = {}
        self._lock = threading.Lock()

    def on_step(self, report: StepReport) -> None:
        if report.prefill_tokens or report.decodes:
            row = MeasuredStep(report.prefill_tokens, report.decodes, report.ended_s - report.started_s)
            with self._lock:
                self.steps.setdefault(report.engine, []).append(row)

    def on_died(self, engine: int, reason: str, lost: tuple[int, ...], crashed: bool = False) -> None:
        raise RuntimeError(f"engine {engine} died while it warmed up: {reason}")


def measure(host: EngineHost, relay: Relay) -> dict[str, tuple[MeasuredStep, ...]]:
    """Rows by model name; each engine is measured alone. The first round is not kept: caches and kernels are cold."""
    rows: dict[str, tuple[MeasuredStep, ...]] = {}
    ids = itertools.count(10**9)  # far from those of requests
    for number, handle in host.engines.items():
        for round_ in range(1 + _ROUNDS):
            listener = _Steps()
            relay.to = listener
            _work(handle, ids, Sampling(logprobs=None if round_ else 1))
            if round_:
                rows[handle.config.name] = rows.get(handle.config.name, ()) + tuple(listener.steps.get(number, ()))
    relay.to = None
    return rows


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
