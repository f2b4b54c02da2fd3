"""Tables of one place: systems with their misses and costs, models of one cell, and its GPUs with what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fineserve_sim.experiment.results.answer import name_of
from fineserve_sim.experiment.results.misses import CAUSES
from fineserve_sim.experiment.show.answer import dollars, percent, worst_models
from fineserve_sim.experiment.show.labels import gpu_text, number

Cell = Mapping[str, Any]

_GIB = 2**30
_MOST_GPUS = 16
_MOST_MODELS = 8
_ANY_WIDTH = 10_000
NEVER = "never"
"""A percentile that falls on a request that never got so far."""


class PlainTable:
    """Columns of numbers, but for those in ``left``. Where the screen is too narrow for all, columns go until the rest fits,
    by ``ranks`` from the highest down: a number is whole or not there."""

    def __init__(self, *headers: str, left: Sequence[int] = (0,), ranks: Mapping[int, int] | None = None) -> None:
        self._headers, self._left = headers, left
        self._going = sorted(ranks or {}, key=lambda at: -(ranks or {})[at])
        self._rows: list[tuple[str | Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        self._rows.append((*cells, *[""] * (len(self._headers) - len(cells))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        kept = list(range(len(self._headers)))
        for at in (*self._going, None):
            table = self._table(kept)
            wanted = Measurement.get(console, options.update(width=_ANY_WIDTH), table).maximum
            if at is None or wanted <= options.max_width:
                break
            kept.remove(at)
        yield table

    def _table(self, kept: Sequence[int]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for at in kept:
            table.add_column(self._headers[at], justify="left" if at in self._left else "right", no_wrap=True)
        for row in self._rows:
            table.add_row(*(row[at] for at in kept))
        return table


def ranked(headers: Sequence[str], order: Sequence[str], first: int) -> dict[int, int]:
    """Which columns from ``first`` on may go, the last of ``order`` first."""
    return {at: order.index(header) for at, header in enumerate(headers) if at >= first and header in order}


_CAUSES_GO = tuple(f"{cause} %" for cause in reversed(CAUSES))
_SYSTEMS_GO = (
    *("TTFT %", "TPOT %", "E2E %", "Worst model", *_CAUSES_GO, "$/Mtok", "TTFT p99 s", "TPOT p99 s", "E2E p99 s"),
    *("tokens/s", "$/1000 ok", "TTFT p50 s", "TPOT p50 s"),
)
_MODELS_GO = (
    *("GPUs", *_CAUSES_GO, "TTFT limit s", "TTFT p99 s", "TPOT p99 s", "E2E p99 s", "tokens/s"),
    *("TTFT p50 s", "TPOT p50 s", "E2E p50 s"),
)
_GPUS_GO = ("requests wait %", "busy %", "weights GiB", "left, mean", "least", "compute %", "bandwidth %")
"""Columns that may go where the screen is narrow, the last first."""


def systems_table(cells: Sequence[Cell]) -> PlainTable:
    """A row a system: attainment, misses by cause in percent of the requests, latencies of all requests, and dollars."""
    causes = [cause for cause in CAUSES if any(cell["misses"][cause] for cell in cells)]
    limited = [moment for moment in ("ttft", "tpot", "e2e") if f"{moment}_attainment" in cells[0]["metrics"]]
    each = [f"{moment.upper()} %" for moment in limited] if len(limited) > 1 else []
    headers = ["System", "GPUs", "Within limits %", *each, *(f"{cause} %" for cause in causes)]
    headers += [
        "TTFT p50 s",
        "TTFT p99 s",
        "TPOT p50 s",
        "TPOT p99 s",
        "E2E p99 s",
        "tokens/s",
        "$/h",
        "$/Mtok",
        "$/1000 ok",
    ]
    headers += ["Worst model", "Binds"]
    table = PlainTable(*headers, left=(0, len(headers) - 2, len(headers) - 1), ranks=ranked(headers, _SYSTEMS_GO, 3))
    best = max((cell["metrics"]["slo_attainment"]["mean"] or 0.0 for cell in cells if cell["gpus"]), default=None)
    for cell in cells:
        within = cell["metrics"]["slo_attainment"]
        if not cell["gpus"]:  # only the attainment of a bound is one
            table.add_row(name_of(cell, cells), "bound", _bare(percent(within["mean"], within["half_width"])))
            continue
        style = "bold" if within["mean"] == best else ""
        table.add_row(
            name_of(cell, cells),
            str(cell["cluster"]["count"]),
            Text(_bare(percent(within["mean"], within["half_width"])), style=style),
            *(_bare(percent(cell["metrics"][f"{moment}_attainment"]["mean"])) for moment in limited if each),
            *(_share(cell["misses"][cause], cell["requests"]) for cause in causes),
            *(
                latency(cell, metric)
                for metric in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "e2e_p99_s")
            ),
            number(cell["metrics"]["token_throughput_per_s"]["mean"]),
            *(_usd(cell, key) for key in ("usd_per_hour", "usd_per_mtoken", "usd_per_1000_within")),
            _worst(cell),
            cell["binds"][0]["what"] if cell["binds"] else "",
        )
    return table


def models_table(cell: Cell, title: str) -> PlainTable:
    """A row a model of one cell, whose system is called ``title``: where it is, attainment, misses by cause in percent of its
    requests, latencies, tokens. Where there are too many to show, those with the lowest attainment, and a row for the rest."""
    causes = [cause for cause in CAUSES if cell["misses"][cause]]
    limit_s = cell["ttft_slo_s"]
    differ = len(set(limit_s.values())) > 1
    headers = [f"Model, {title}", "GPUs", "requests", "Within %", *(f"{cause} %" for cause in causes)]
    headers += ["TTFT limit s"] * differ
    headers += [f"{moment} p{percent} s" for moment in ("TTFT", "TPOT", "E2E") for percent in (50, 99)]
    headers += ["tokens/s"]
    table = PlainTable(*headers, left=(0, 1), ranks=ranked(headers, _MODELS_GO, 1))
    moments = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "e2e_p50_s", "e2e_p99_s")
    shown = most_missed(cell["models"])
    for name in shown:
        model = cell["models"][name]
        table.add_row(
            name,
            _places(cell, model),
            *_fates([model], causes),
            *([number(float(limit_s[name]))] * differ),
            *(latency(cell, metric, name) for metric in moments),
            number(cell["metrics"]["token_throughput_per_s"]["by_model"][name]["mean"]),
        )
    if rest := [model for name, model in cell["models"].items() if name not in shown]:
        table.add_row(f"{len(rest)} others", "", *_fates(rest, causes))
    return table


def most_missed(models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """All models, or where there are too many to show those with the lowest share within their limits, as far as that is below
    one."""
    if len(models) <= _MOST_MODELS:
        return list(models)
    shares = {name: model["within"] / model["requests"] for name, model in models.items() if model["requests"]}
    return sorted((name for name in shares if shares[name] < 1), key=lambda name: shares[name])[:_MOST_MODELS]


def _fates(models: Sequence[Mapping[str, Any]], causes: Sequence[str]) -> Iterator[str | Text]:
    """Of some models together: requests, percent within their limits, and percent missed by each cause."""
    requests = sum(model["requests"] for model in models)
    share = sum(model["within"] for model in models) / requests if requests else None
    yield number(requests)
    yield Text(_bare(percent(share)), style="bold red" if share is not None and share < 0.5 else "")
    yield from (_share(sum(model["misses"][cause] for model in models), requests) for cause in causes)


def gpus_table(cell: Cell, title: str) -> PlainTable:
    """A row a GPU of one cell, whose system is called ``title``; the one with the most waiting requests first where there are
    too many to show."""
    headers = [f"GPU, {title}", "models", "weights GiB", "KV GiB", "left, mean", "least", "busy %", "compute %"]
    headers += ["bandwidth %", "requests wait %"]
    table = PlainTable(*headers, left=(0, 1), ranks=ranked(headers, _GPUS_GO, 2))
    shown = most_waiting(cell["gpus"])
    for gpu in shown:
        table.add_row(
            gpu_text(gpu),
            ", ".join(gpu["models"]) or "none",
            *(_gib(gpu[key]) for key in ("weights_bytes", "kv_bytes", "kv_left_bytes", "kv_least_bytes")),
            *(f"{100 * gpu[key]:.0f}" for key in ("busy", "compute", "bandwidth", "waiting")),
        )
    if len(shown) < len(cell["gpus"]):
        table.add_row(f"and {len(cell['gpus']) - len(shown)} more", "(gpus.parquet)")
    return table


def most_waiting(gpus: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All GPUs, or those with the most waiting requests where there are too many to show."""
    if len(gpus) <= _MOST_GPUS:
        return list(gpus)
    return sorted(gpus, key=lambda gpu: -gpu["waiting"])[:_MOST_GPUS]


MEMORY_PARTS = ("Weights", "Activations and contexts", "KV in use, mean", "KV left, mean")
TIME_PARTS = {
    "busy": "Busy",
    "compute": "Compute needed",
    "bandwidth": "Bandwidth needed",
    "waiting": "Requests wait",
}
"""What fills a GPU's usable memory, and what is told of its time, by the key of an entry of ``gpus``."""


def memory_gib(gpu: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """GiB of each of ``MEMORY_PARTS``. A GPU of which no sample is there counts as empty of KV."""
    left = gpu["kv_bytes"] if gpu["kv_left_bytes"] is None else min(gpu["kv_left_bytes"], gpu["kv_bytes"])
    other = max(0, gpu["usable_bytes"] - gpu["weights_bytes"] - gpu["kv_bytes"])
    return gpu["weights_bytes"] / _GIB, other / _GIB, (gpu["kv_bytes"] - left) / _GIB, left / _GIB


def latency(cell: Cell, metric: str, model: str | None = None) -> str:
    """A percentile in seconds over all requests, or that so many never got so far."""
    found = cell["metrics"][metric]
    mean = found["mean"] if model is None else found["by_model"][model]["mean"]
    own = cell if model is None else cell["models"][model]
    unserved = sum(own["misses"][cause] for cause in ("prompt", "dropped", "rejected", "unplaced", "unfinished"))
    return NEVER if mean is None and unserved else number(mean)


def _places(cell: Cell, model: Mapping[str, Any]) -> str:
    """The GPUs of each instance."""
    if not cell["gpus"]:
        return "–"
    return ", ".join("+".join(map(str, gpus)) for gpus in model["instances"]) or (
        "host" if cell["models_move"] else "NONE"
    )


def _worst(cell: Cell) -> str:
    return next(iter(worst_models(cell, 1)), "") if len(cell["models"]) > 1 else ""


def _usd(cell: Cell, key: str) -> str:
    value = cell["cost"][key]
    return "–" if value is None or not cell["gpus"] else dollars(value)


def _share(count: int, requests: int) -> str:
    return f"{100 * count / requests:.1f}" if count else ""


def _bare(text: str) -> str:
    return text.removesuffix(" %")


def _gib(bytes: int | None) -> str:
    return "–" if bytes is None else f"{bytes / _GIB:.1f}"
