"""``fineserve-run top`` shows the state of a running server, read from its metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

Figures = dict[str, dict[str, float]]
"""Figure by model; the model "" stands for the device."""

_COUNTERS = ("ttft_slo_met", "ttft_slo_due", "generation_tokens")


def top(
    url: Annotated[str, typer.Argument(help="Address of the server.")] = "http://127.0.0.1:8000",
    *,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Look once and print JSON.")] = False,
) -> None:
    """Live view of a server: KV memory by model, queues, SLO attainment."""
    from rich.live import Live

    from fineserve_sim.cli.console import console

    before = now = look(url)
    if as_json:
        typer.echo(json.dumps(now, indent=1))
        return
    if once:
        console().print(view(now, now, 0.0))
        return
    try:
        with Live(view(now, now, 0.0), screen=True) as live:
            while True:
                time.sleep(every)
                before, now = now, look(url)
                live.update(view(now, before, every))
    except KeyboardInterrupt:
        raise typer.Exit from None


def look(url: str) -> Figures:
    """The figures of a server now. Raises ValueError when it does not answer."""
    from urllib.error import URLError
    from urllib.request import urlopen

    try:
        with urlopen(f"{url.rstrip('/')}/metrics", timeout=5) as answer:
            return figures(answer.read().decode())
    except (URLError, OSError, ValueError) as problem:
        raise ValueError(f"{url} does not answer as a fineserve-run server ({problem}); is it running?") from None


def figures(text: str) -> Figures:
    """Prometheus text as figures by model."""
    from prometheus_client.parser import text_string_to_metric_families

    found: Figures = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.partition(":")[2]
            if family.type == "histogram" and not name.endswith(("_sum", "_count")):
                continue
            if name == "region_bytes":
                device = found.setdefault("", {})
                device[sample.labels["part"]] = device.get(sample.labels["part"], 0.0) + sample.value
            elif "model_name" in sample.labels:
                key = name.removesuffix("_total")
                model = found.setdefault(sample.labels["model_name"], {})
                model[key] = model.get(key, 0.0) + sample.value
    return found


def view(now: Figures, before: Figures, gap_s: float) -> Table:
    """One row a model."""
    from rich.table import Table

    region = now.get("", {})
    total = region.get("total", 0.0)
    free = f"{mib(region.get('free', 0))} free, {mib(region.get('stranded', 0))} stranded"
    table = Table(title=f"KV memory {mib(total)} MiB: {free}", title_justify="left", box=None, pad_edge=False)
    for header in (
        "model",
        "awake",
        "running",
        "waiting",
        "KV MiB",
        "",
        "stranded",
        "TTFT s",
        "tokens/s",
        "SLO",
        "SLO now",
    ):
        table.add_column(header, justify="left" if header in ("model", "") else "right", no_wrap=True)
    for model in sorted(name for name in now if name):
        table.add_row(*_row(model, now[model], before.get(model, {}), total, gap_s))
    return table


def _row(model: str, now: Mapping[str, float], before: Mapping[str, float], total: float, gap_s: float) -> list[str]:
    gained = {name: now.get(name, 0.0) - before.get(name, 0.0) for name in _COUNTERS}
    used = now.get("kv_used_bytes", 0.0)
    ttft = ratio(now.get("time_to_first_token_seconds_sum", 0.0), now.get("time_to_first_token_seconds_count", 0.0))
    return [
        model,
        f"{now.get('engines_awake', 0):.0f}",
        f"{now.get('num_requests_running', 0):.0f}",
        f"{now.get('num_requests_waiting', 0):.0f}",
        mib(used),
        bar(used / total if total else 0.0),
        mib(now.get("kv_stranded_bytes", 0.0)),
        "-" if ttft is None else f"{ttft:.3f}",
        "-" if not gap_s else f"{gained['generation_tokens'] / gap_s:.0f}",
        percent(ratio(now.get("ttft_slo_met", 0.0), now.get("ttft_slo_due", 0.0))),
        percent(ratio(gained["ttft_slo_met"], gained["ttft_slo_due"])),
    ]


def mib(value: float) -> str:
    return f"{value / 2**20:.1f}"


def bar(part: float, width: int = 20) -> str:
    full = min(width, round(part * width))
    return "█" * full + "·" * (width - full)


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
