"""A span a request, in the trace of its client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from filekit import write_file
from fineserve_runtime import tracing
from fineserve_runtime.config import load_file
from fineserve_runtime.engines.api import Sampling
from fineserve_runtime.jobs import End, Job
from runtimekit import Heard, core_spec, runtime
from serverkit import served

from fineserve_sim.experiment.file.errors import ConfigError

TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_what_is_not_installed_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "NEEDED", ("opentelemetry_that_is_not_there.sdk",))
    with pytest.raises(ConfigError, match=r"runtime.tracing: .* is not installed; pip install 'fineserve\[tracing\]'"):
        load_file(write_file(tmp_path), [("runtime.tracing", "true")])


def test_a_request_keeps_the_trace_of_its_client() -> None:
    given = f"00-{TRACE}-b7ad6b7169203331-01"
    traces: list[str | None] = []

    class Seen:
        def __getattr__(self, name: str) -> Any:
            return lambda job, *rest: traces.append(job.trace) if name == "ended" else None

    with served(observers=(Seen(),)) as here:
        for headers in ({"traceparent": given}, {}):
            assert here.post("/v1/completions", {"model": "A", "prompt": "x"}, **headers).status_code == 200
    assert traces == [given, None]


def test_a_span_has_the_times_and_counts_of_its_request() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    observer = tracing.Tracing(kept)
    with runtime(core_spec(), observers=(observer,)) as here:
        sampling, heard = Sampling(max_tokens=7), Heard()
        trace = f"00-{TRACE}-b7ad6b7169203331-01"
        here.driver.submit(lambda id: Job(id, "A", (5, 6, 7), sampling, heard, 10.0, trace=trace))
        here.ask("B", tokens=400)
        while not heard.end:
            here.host.step_all()
        here.driver.end_all()
    observer.close()
    done, failed = kept.get_finished_spans()
    assert heard.end == End("finished", "length")
    assert format(done.context.trace_id, "032x") == TRACE and done.parent is not None and failed.parent is None
    assert done.attributes["gen_ai.response.model"] == "A" and done.attributes["gen_ai.usage.completion_tokens"] == 7
    first_s, all_s = (done.attributes[f"gen_ai.latency.{each}"] for each in ("time_to_first_token", "e2e"))
    assert 0 < first_s <= all_s and done.end_time - done.start_time == pytest.approx(all_s * 1e9, abs=1e6)
    assert failed.attributes["fineserve.reason"] == "shutdown" and not failed.status.is_ok
