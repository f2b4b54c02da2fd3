"""Build the sketch of ServeGen's clients: rate and variation of the busiest ones, hour by hour of one day.

    python traces/build_servegen_sketch.py DATA_DIR [--out FOLDER]

DATA_DIR holds servegen_rates_m-large.csv.gz (or traces/servegen_rates_m-large.csv.gz). The result depends on the file alone: no
random number is drawn.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fineserve_traces.servegen import CLIENTS, FILE, NAME, servegen_clients

UPSTREAM = "github.com/alibaba/ServeGen data/*/m-large/chunk-*-trace.csv @ f891d1189eb3"


def build(data_dir: Path) -> str:
    """The sketch as JSON text, one client a line."""
    clients = [
        json.dumps({"family": c.family, "rates": [h.rate_per_s for h in c.hours], "cvs": [h.cv for h in c.hours]})
        for c in servegen_clients(CLIENTS, data_dir)
    ]
    head = {"name": NAME, "file": FILE, "upstream": UPSTREAM, "licence": "Apache-2.0"}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    listed = ",\n  ".join(clients)
    return "{\n" + ",\n".join([*lines, f' "clients": [\n  {listed}\n ]']) + "\n}\n"


def main(arguments: list[str] | None = None) -> None:
    """Write the sketch."""
    parser = argparse.ArgumentParser(description="Build the sketch of ServeGen's clients.")
    parser.add_argument("data_dir", type=Path, help="folder of the windows, or its parent")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "fineserve_traces" / "data")
    options = parser.parse_args(arguments)
    text = build(options.data_dir)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{NAME}.json").write_text(text, encoding="utf-8")
    print(f"{NAME}: {CLIENTS} clients in {len(text):,} bytes")


if __name__ == "__main__":
    main()
