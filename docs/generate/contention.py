"""What the way of sharing decides: Fig. 10 at one point, under each."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from docs.generate.errors import read
from docs.generate.markdown import table
from fineserve_sim.experiment import load_experiment, run_loaded

FIG10 = Path(__file__).parents[2] / "experiments" / "fig10.yaml"
POINT = (
    ("sweeps", "[{name: point, axes: {slo_scale: [20], load: [B]}, at: {rate_scale: 8}}]"),
    ("figures", "[]"),
    ("claims", "[]"),
)
WAYS: dict[str, Sequence[tuple[str, str]]] = {
    "MPS (the systems' own)": (),
    "MPS, demands at every step": (("engine.contention", "step"),),
    "fluid": (("cluster.sharing", "fluid"),),
    "time-slicing": (("cluster.sharing", "time_slice"),),
}
SYSTEMS = {"fineserve": "FineServe", "prism*": "Prism*", "static*": "Static*"}
COLUMNS = ("sharing", *(f"{name}, {what}" for what in ("attainment %", "tokens/s") for name in SYSTEMS.values()))


def contention() -> str:
    return table(
        [name.replace("*", "\\*") for name in COLUMNS], (tuple(row.values()) for row in read("contention.csv"))
    )


def caption() -> str:
    """What README.md says under its picture."""
    own = read("contention.csv")[0]
    fineserve, prism, static = (own[f"{name}, attainment %"] for name in SYSTEMS.values())
    return (
        "*Seven models on four H100 (`experiments/fig10.yaml`). Under load B at SLO scale 20, FineServe holds "
        f"{fineserve} % of its TTFT\nlimits, Static\\* {static} %, Prism\\* {prism} % "
        "([why](docs/reproduction/fineserve.md#fig-10-end-to-end-on-one-node)).*"
    )


def row_of(way: str) -> dict[str, object]:
    """Attainment and decode throughput of each system with their intervals, as ``contention.csv`` has them. Takes seconds."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_loaded(load_experiment(FIG10, [*POINT, *WAYS[way]]), Path(folder), jobs=1)
        cells = {cell["system"]: cell["metrics"] for cell in json.loads(found.read_text(encoding="utf-8"))["cells"]}
    held = [cells[name]["ttft_attainment"] for name in SYSTEMS]
    tokens = [cells[name]["decode_throughput_tokens_per_s"] for name in SYSTEMS]
    numbers = [f"{100 * one['mean']:.1f} ± {100 * one['half_width']:.1f}" for one in held]
    numbers += [f"{one['mean']:,.0f} ± {one['half_width']:,.0f}" for one in tokens]
    return dict(zip(COLUMNS, (way, *numbers), strict=True))
