"""Tables of one place: systems with their misses and costs, models of one cell, and its GPUs with what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fineserve_sim.experiment.results.misses import CAUSES
from fineserve_sim.experiment.show.answer import dollars, percent, worst_models
from fineserve_sim.experiment.show.labels import number

Cell = Mapping[str, Any]

_GIB = 2**30
_MOST_GPUS = 16
_NEVER = "never"
"""A percentile that falls on a request that never got so far."""


def plain_table(*headers: str, left: Sequence[int] = (0,)) -> Table:
    """Columns of numbers, but for those in ``left``."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, header in enumerate(headers):
        table.add_column(header, justify="left" if at in left else "right", no_wrap=True)
    return table


def systems_table(cells: Sequence[Cell]) -> Table:
    """A row a system: attainment, misses by cause in percent of the requests, latencies of all requests, and dollars."""
    causes = [cause for cause in CAUSES if any(cell["misses"][cause] for cell in cells)]
    limited = [moment for moment in ("ttft", "tpot", "e2e") if f"{moment}_attainment" in cells[0]["metrics"]]
    each = [f"{moment.upper()} %" for moment in limited] if len(limited) > 1 else []
    headers = ["System", "GPUs", "Within limits %", *each, *(f"{cause} %" for cause in causes)]
    headers += ["TTFT p50 s", "p99", "TPOT p50 s", "p99", "E2E p99 s", "tokens/s", "$/h", "$/Mtok", "$/1000 ok"]
    table = plain_table(*headers, "Worst model", "Binds", left=(0, len(headers), len(headers) + 1))
    best = max((cell["metrics"]["slo_attainment"]["mean"] or 0.0 for cell in cells if cell["gpus"]), default=None)
    for cell in cells:
        within = cell["metrics"]["slo_attainment"]
        if not cell["gpus"]:  # only the attainment of a bound is one
            table.add_row(cell["title"], "bound", _bare(percent(within["mean"], within["half_width"])))
            continue
        style = "bold" if within["mean"] == best else ""
        table.add_row(
            cell["title"],
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


def models_table(cell: Cell) -> Table:
    """A row a model of one cell: where it is, attainment, misses by cause in percent of its requests, latencies, tokens."""
    causes = [cause for cause in CAUSES if cell["misses"][cause]]
    limit_s = cell["ttft_slo_s"]
    differ = len(set(limit_s.values())) > 1
    headers = [f"Model, {cell['title']}", "GPUs", "requests", "Within %", *(f"{cause} %" for cause in causes)]
    headers += ["TTFT limit s"] * differ
    headers += ["TTFT p50 s", "p99", "TPOT p50 s", "p99", "E2E p50 s", "p99", "tokens/s"]
    table = plain_table(*headers, left=(0, 1))
    moments = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "e2e_p50_s", "e2e_p99_s")
    for name, model in cell["models"].items():
        share = model["within"] / model["requests"] if model["requests"] else None
        table.add_row(
            name,
            _places(cell, model),
            number(model["requests"]),
            Text(_bare(percent(share)), style="bold red" if share is not None and share < 0.5 else ""),
            *(_share(model["misses"][cause], model["requests"]) for cause in causes),
            *([number(float(limit_s[name]))] * differ),
            *(latency(cell, metric, name) for metric in moments),
            number(cell["metrics"]["token_throughput_per_s"]["by_model"][name]["mean"]),
        )
    return table


def gpus_table(cell: Cell) -> Table:
    """A row a GPU of one cell, the one with the most waiting requests first where there are too many to show."""
    table = plain_table(
        f"GPU, {cell['title']}", "models", "weights GiB", "KV GiB", "left, mean", "least", "busy %", "compute %",
        "bandwidth %", "requests wait %", left=(0, 1),
    )  # fmt: skip
    shown = most_waiting(cell["gpus"])
    for gpu in shown:
        table.add_row(
            str(gpu["gpu"]),
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


def latency(cell: Cell, metric: str, model: str | None = None) -> str:
    """A percentile in seconds over all requests, or that so many never got so far."""
    found = cell["metrics"][metric]
    mean = found["mean"] if model is None else found["by_model"][model]["mean"]
    own = cell if model is None else cell["models"][model]
    unserved = sum(own["misses"][cause] for cause in ("dropped", "rejected", "unplaced", "unfinished"))
    return _NEVER if mean is None and unserved else number(mean)


def _places(cell: Cell, model: Mapping[str, Any]) -> str:
    """The GPUs of each instance."""
    if not cell["gpus"]:
        return "–"
    return ", ".join("+".join(map(str, gpus)) for gpus in model["instances"]) or (
        "host" if cell["models_move"] else "NONE"
    )


def _worst(cell: Cell) -> str:
    return next(iter(worst_models(cell, 1)), "").removesuffix(" within") if len(cell["models"]) > 1 else ""


def _usd(cell: Cell, key: str) -> str:
    value = cell["cost"][key]
    return "–" if value is None or not cell["gpus"] else dollars(value)


def _share(count: int, requests: int) -> str:
    return f"{100 * count / requests:.1f}" if count else ""


def _bare(text: str) -> str:
    return text.removesuffix(" %")


def _gib(bytes: int | None) -> str:
    return "–" if bytes is None else f"{bytes / _GIB:.1f}"
