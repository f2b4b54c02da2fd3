"""Spans of OpenTelemetry, one a request, under the names that vLLM gives them.

Where they go is said by OpenTelemetry's own environment variables (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_SERVICE_NAME``,
``OTEL_TRACES_SAMPLER``, ...). A span is made when its request has ended, with the times of then. It leaves by a thread of
OpenTelemetry's from a bounded queue, so a collector that is slow or gone costs spans and nothing else. The trace of a
request's ``traceparent`` header goes on in its span.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from fineserve_runtime.jobs import End, Job

NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp")


def missing() -> str | None:
    """The packages that tracing needs and that are not installed."""
    for module in NEEDED:
        try:
            if find_spec(module) is None:
                return module
        except ModuleNotFoundError:
            return module
    return None


class Tracing:
    """An ``Observer``. ``exporter`` None: OTLP, as the environment says. ``close`` sends the last spans."""

    def __init__(self, exporter: Any = None) -> None:
        sdk: Any = import_module("opentelemetry.sdk.trace")
        export: Any = import_module("opentelemetry.sdk.trace.export")
        resources: Any = import_module("opentelemetry.sdk.resources")
        self._api: Any = import_module("opentelemetry.trace")
        propagation: Any = import_module("opentelemetry.trace.propagation.tracecontext")
        if exporter is None:
            exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()
        self._provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": "fineserve"}))
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("fineserve_runtime")
        self._propagator = propagation.TraceContextTextMapPropagator()
        self._dispatched_s: dict[int, float] = {}

    def close(self) -> None:
        self._provider.shutdown()

    def arrived(self, job: Job) -> None: ...

    def dispatched(self, job: Job, now: float) -> None:
        self._dispatched_s.setdefault(job.id, now)

    def emitted(self, job: Job, tokens: int, now: float) -> None: ...

    def preempted(self, job: Job) -> None: ...

    def ended(self, job: Job, end: End, now: float) -> None:
        ended_ns = time.time_ns()
        begun_ns = ended_ns - int((now - job.arrival_s) * 1e9)
        context = self._propagator.extract({"traceparent": job.trace}) if job.trace else None
        kind = self._api.SpanKind.SERVER
        span = self._tracer.start_span("llm_request", context=context, kind=kind, start_time=begun_ns)
        span.set_attributes(_attributes(job, end, now, self._dispatched_s.pop(job.id, None)))
        if end.kind == "failed":
            span.set_status(self._api.StatusCode.ERROR, end.message)
        span.end(ended_ns)


def _attributes(job: Job, end: End, now: float, dispatched_s: float | None) -> Mapping[str, str | int | float]:
    found: dict[str, str | int | float | None] = {
        "gen_ai.request.id": str(job.id),
        "gen_ai.response.model": job.model,
        "gen_ai.request.max_tokens": job.sampling.max_tokens,
        "gen_ai.request.temperature": job.sampling.temperature,
        "gen_ai.usage.prompt_tokens": len(job.prompt),
        "gen_ai.usage.completion_tokens": len(job.generated),
        "gen_ai.latency.e2e": now - job.arrival_s,
        "gen_ai.latency.time_in_queue": None if dispatched_s is None else dispatched_s - job.arrival_s,
        "gen_ai.latency.time_to_first_token": None if job.first_token_s is None else job.first_token_s - job.arrival_s,
        "fineserve.end": end.kind,
        "fineserve.reason": end.reason,
        "fineserve.preemptions": job.preemptions,
    }
    return {name: value for name, value in found.items() if value is not None}
