"""Prometheus figures: under vLLM's names where vLLM has one (label ``model_name``), else under ``fineserve:``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fineserve_runtime.engines.api import EngineHandle, EngineHost
from fineserve_runtime.jobs import End, Job, Limits
from fineserve_runtime.lives import Health
from fineserve_runtime.logs import LineLog

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_E2E_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)
_MODEL = ["model_name"]

TWIN_IS_OFF = "twin is off"
"""The incident of a simulator that is further from what was measured than the file allows."""


class Metrics:
    """An ``Observer`` with a registry of its own. Counters of every model exist from the start, at 0."""

    def __init__(self, models: Iterable[str]) -> None:
        self.registry = CollectorRegistry()
        self._live: dict[str, int] = {}
        self._preemptions = self._counter("vllm:num_preemptions", "Requests that lost their KV blocks.")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests with a first token.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._success = self._counter("vllm:request_success", "Requests that finished.", "finished_reason")
        self._unfinished = self._counter(
            "fineserve:requests_unfinished", "Requests refused, failed or aborted.", "reason"
        )
        self._slo_met = self._counter("fineserve:ttft_slo_met", "Finished requests with the first token in time.")
        self._slo_due = self._counter(
            "fineserve:ttft_slo_due", "Requests that ended; those of clients that left apart."
        )
        self._tpot_met = self._counter(
            "fineserve:tpot_slo_met", "Finished requests with their time per token in limits."
        )
        self._tpot_due = self._counter("fineserve:tpot_slo_due", "As ttft_slo_due, of requests with a TPOT limit.")
        self._deaths = self._counter("fineserve:engine_deaths", "Engines that died, by cause.", "cause")
        self._restarts = self._counter("fineserve:engine_restarts", "Engines that were started again.")
        self._hangs = self._counter("fineserve:engine_hangs", "Engines that gave no sign of life and were ended.")
        self._errors = Counter(
            "fineserve:internal_errors", "What went wrong in the server's own threads.", registry=self.registry
        )
        self._turned_away = Counter(
            "fineserve:http_refused",
            "HTTP requests refused before a model saw them.",
            ["reason"],
            registry=self.registry,
        )
        self._twin = Gauge(
            "fineserve:twin_error", "Simulated over measured, less 1, when last asked.", ["of"], registry=self.registry
        )
        self._twin_off = Counter(
            "fineserve:twin_alarms", "Answers of a twin that was off by more than twin_error.", registry=self.registry
        )
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_S)
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Between two tokens.", _ITL_S)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _E2E_S)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Arrival to dispatch.", _E2E_S)
        for model in models:
            self.add_model(model)

    def add_model(self, model: str) -> None:
        """Its counters begin at 0, or go on where it was removed before."""
        self._live[model] = 0
        for family in (
            self._preemptions,
            self._prompt_tokens,
            self._generation_tokens,
            self._slo_met,
            self._slo_due,
            self._tpot_met,
            self._tpot_due,
            self._restarts,
            self._hangs,
        ):
            family.labels(model)
        for cause in ("crash", "gone"):
            self._deaths.labels(model, cause)

    def remove_model(self, model: str) -> None:
        """A model without requests; what was counted of it stays."""
        self._live.pop(model)

    @property
    def live(self) -> Mapping[str, int]:
        """Requests that have not ended, by model."""
        return self._live

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def turned_away(self, model: str, reason: str, limits: Limits) -> None:
        """A request that the driver did not take."""
        self._unfinished.labels(model, reason).inc()
        self._slo_due.labels(model).inc()
        if limits.tpot_s is not None:
            self._tpot_due.labels(model).inc()

    def http_refused(self, reason: str) -> None:
        """A request was refused before a model saw it."""
        self._turned_away.labels(reason).inc()

    def incident(self, what: str, facts: Mapping[str, object]) -> None:
        """Count an incident that the driver tells."""
        model = str(facts.get("model", ""))
        if what == "engine died":
            self._deaths.labels(model, "crash" if facts.get("crashed") else "gone").inc()
        elif what == "engine hung":
            self._hangs.labels(model).inc()
        elif what == "activated" and facts.get("again"):
            self._restarts.labels(model).inc()
        elif what == "internal error":
            self._errors.inc()
        elif what == TWIN_IS_OFF:
            self._twin_off.inc()

    def twin(self, errors: Mapping[str, float]) -> None:
        """Note how far the simulator was off, by quantity."""
        for name, error in errors.items():
            self._twin.labels(name).set(error)

    def watch_logs(self, logs: Sequence[LineLog]) -> None:
        self.registry.register(LogFigures(logs))

    # --- Observer --------------------------------------------------------------------------------------------------

    def arrived(self, job: Job) -> None:
        self._live[job.model] += 1

    def dispatched(self, job: Job, now: float) -> None:
        self._queue.labels(job.model).observe(now - job.arrival_s)

    def emitted(self, job: Job, tokens: int, now: float) -> None:
        self._generation_tokens.labels(job.model).inc(tokens)
        if job.first_token_s is None:
            self._prompt_tokens.labels(job.model).inc(len(job.prompt))
            self._ttft.labels(job.model).observe(now - job.arrival_s)
        elif job.last_token_s is not None:
            self._itl.labels(job.model).observe((now - job.last_token_s) / tokens)

    def preempted(self, job: Job) -> None:
        self._preemptions.labels(job.model).inc()

    def ended(self, job: Job, end: End, now: float) -> None:
        self._live[job.model] -= 1
        if end.kind == "finished":
            self._success.labels(job.model, end.reason).inc()
            self._e2e.labels(job.model).observe(now - job.arrival_s)
        else:
            self._unfinished.labels(job.model, end.reason).inc()
        if end.kind != "aborted":
            self._judge(job, finished=end.kind == "finished")

    def _judge(self, job: Job, *, finished: bool) -> None:
        """A request of one token has no time per token, and meets any limit of it."""
        self._slo_due.labels(job.model).inc()
        if finished and job.first_token_s is not None and job.first_token_s - job.arrival_s <= job.slo_s:
            self._slo_met.labels(job.model).inc()
        if job.tpot_slo_s is not None:
            self._tpot_due.labels(job.model).inc()
            if finished and (job.tpot_s is None or job.tpot_s <= job.tpot_slo_s):
                self._tpot_met.labels(job.model).inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, [*_MODEL, *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _MODEL, buckets=buckets, registry=self.registry)


class LogFigures(Collector):
    """Lines that logs lost because they could not be written in time."""

    def __init__(self, logs: Sequence[LineLog]) -> None:
        self._logs = logs

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily("fineserve:log_lines_lost", "Lines that a log could not write.", labels=["log"])
        for log in self._logs:
            family.add_metric([log.name], log.lost)
        yield family


class EngineFigures(Collector):
    """What engines and devices hold at the moment of a scrape. ``health`` tells how a model is."""

    def __init__(
        self, hosts: Mapping[int, EngineHost], live: Mapping[str, int], health: Callable[[str], Health]
    ) -> None:
        self._hosts = hosts
        self._live = live
        self._health = health

    def collect(self) -> Iterator[Metric]:
        live = dict(self._live)  # models may come and go meanwhile
        handles = [
            (host, handle)
            for host in self._hosts.values()
            for handle in host.engines.values()
            if handle.config.name in live
        ]
        yield from self._models(live)
        yield from self._requests(live, [handle for _, handle in handles])
        yield from self._kv(live, handles)
        yield from self._devices()

    def _models(self, live: Mapping[str, int]) -> Iterator[Metric]:
        health = {model: self._health(model) for model in live}
        ready = {model: float(each.condition == "ready") for model, each in health.items()}
        yield _gauge("fineserve:model_ready", "1 where an engine serves the model.", ready)
        down_s = {model: each.down_s for model, each in health.items()}
        yield _counter("fineserve:model_down_seconds", "Seconds without an engine.", down_s)

    def _requests(self, live: Mapping[str, int], handles: Sequence[EngineHandle]) -> Iterator[Metric]:
        running = dict.fromkeys(live, 0)
        awake = dict.fromkeys(live, 0)
        for handle in handles:
            if handle.alive and not handle.asleep:
                running[handle.config.name] += handle.state().running
                awake[handle.config.name] += 1
        waiting = {model: max(0, here - running[model]) for model, here in live.items()}
        yield _gauge("vllm:num_requests_running", "Requests that hold a slot of an engine.", running)
        yield _gauge("vllm:num_requests_waiting", "Requests without a slot.", waiting)
        yield _gauge("fineserve:engines_awake", "Engines that are resident.", awake)

    def _kv(self, live: Mapping[str, int], handles: Sequence[tuple[EngineHost, EngineHandle]]) -> Iterator[Metric]:
        fields = ("leased_bytes", "used_bytes", "stranded_bytes", "cached_bytes", "spare_bytes", "weight_bytes")
        counted = ("prefix_queries", "prefix_hits")
        sums = {field: dict.fromkeys(live, 0.0) for field in (*fields, *counted, *_PAGE_CALLS)}
        usage = dict.fromkeys(live, 0.0)
        for host, handle in handles:
            for gpu in handle.gpus:
                stats = handle.stats(gpu)
                for field in fields:
                    sums[field][handle.config.name] += getattr(stats, field)
                usage[handle.config.name] += stats.used_bytes / host.config.region_bytes
            for field in (*counted, *_PAGE_CALLS):
                sums[field][handle.config.name] += getattr(stats, field)
        for field, (name, text) in _PAGE_CALLS.items():
            yield _counter(f"fineserve:{name}", text, sums[field])
        for field in counted:
            name = f"vllm:prefix_cache_{field.removeprefix('prefix_')}"
            yield _counter(name, "Prompt tokens, with prefix caching.", sums[field])
        texts = {
            "leased_bytes": "Bytes of slabs that the model's engines hold.",
            "used_bytes": "Bytes of KV blocks in use.",
            "stranded_bytes": "Free bytes in partly used slabs.",
            "cached_bytes": "Bytes of idle cached prefixes.",
            "spare_bytes": "Bytes of pages that are mapped and free.",
            "weight_bytes": "Bytes of weights in the region.",
        }
        for field in fields:
            yield _gauge(
                f"fineserve:kv_{field}" if field != "weight_bytes" else f"fineserve:{field}", texts[field], sums[field]
            )
        yield _gauge("vllm:kv_cache_usage_perc", "Part of the region that the model's KV blocks use, 1 is all.", usage)

    def _devices(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("fineserve:region_bytes", "Bytes of a device's region.", labels=["device", "part"])
        devices = ((gpu, host.ledger(gpu)) for host in self._hosts.values() for gpu in host.config.gpus)
        for gpu, ledger in devices:
            for part, value in ledger._asdict().items():
                family.add_metric([str(gpu), part.removesuffix("_bytes")], value)
        yield family


_PAGE_CALLS = {
    "pages_mapped": ("kv_pages_mapped", "Pages of KV memory that were mapped."),
    "map_s": ("kv_page_map_seconds", "Seconds that mapping them took."),
    "pages_unmapped": ("kv_pages_unmapped", "Pages of KV memory that were unmapped."),
    "unmap_s": ("kv_page_unmap_seconds", "Seconds that unmapping them took."),
}
"""Counters of memory that is mapped page by page, by field of `EngineStats`."""


def _counter(name: str, text: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=_MODEL)
    for model, value in values.items():
        family.add_metric([model], value)
    return family


def _gauge(name: str, text: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=_MODEL)
    for model, value in values.items():
        family.add_metric([model], value)
    return family
