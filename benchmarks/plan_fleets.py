"""What ``fineserve-sim plan`` takes for 64 models on 32 H100, and for 500 on 250: wall seconds, memory, and what it answers.

    PYTHONPATH=build/compiled python benchmarks/plan_fleets.py --out FOLDER [--fleet 64] [--data ../shared/data]

The models are the twelve of ``plan_twelve.py`` in turn, the trace is ``azure2023_conv``, its requests are dealt out evenly, and
the TTFT limit is a second. The search has 600 evaluations for the 64, and two minutes for the 500.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import yaml

SITUATIONS = Path(__file__).with_name("plan_matrix.yaml")
FLEETS = {
    64: ("--gpus", "32", "--rate-scale", "45", "--evaluations", "600"),
    500: ("--gpus", "250", "--rate-scale", "300", "--seconds", "120"),
}
"""Options by the number of models."""


def command(models: int, trace: Path, out: Path) -> Sequence[str]:
    """The command line of one fleet."""
    twelve = yaml.safe_load(SITUATIONS.read_text(encoding="utf-8"))["mixes"]["twelve"]
    wanted = [f"--model=m{number}={model}" for number, model in enumerate(islice(cycle(twelve), models))]
    program = str(Path(sys.executable).with_name("fineserve-sim"))
    return [program, "plan", str(trace), "--spread", *wanted, *FLEETS[models], "--ttft-slo", "1", "--out", str(out)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the plans")
    parser.add_argument("--fleet", type=int, choices=FLEETS, nargs="+", default=list(FLEETS), help="number of models")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with traces/")
    options = parser.parse_args()
    trace = next((options.data / "traces").glob("azure2023_conv.*"))
    for models in options.fleet:
        began_s = time.monotonic()
        program = subprocess.Popen(command(models, trace, options.out / str(models)))
        _, status, used = os.wait4(program.pid, 0)  # the memory of this one and its workers, not of the fleet before
        if status:
            sys.exit(os.waitstatus_to_exitcode(status))
        took_s, peak_mb = time.monotonic() - began_s, used.ru_maxrss / 1024
        print(f"{models} models: {took_s:.0f} s, at most {peak_mb:.0f} MB a process", flush=True)


if __name__ == "__main__":
    main()
