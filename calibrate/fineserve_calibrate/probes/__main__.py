"""``python3 -m fineserve_calibrate.probes --gpu NAME --out DIR``: measure, and no more.

A GPU machine may have torch, but not all that the project needs. Beside torch (and vLLM) this takes numpy, pydantic, PyYAML and
rich. ``fineserve-calibrate report DIR`` makes tables and report of what it wrote, on any machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from fineserve_calibrate.probes.schema import ProbeError
from fineserve_calibrate.probes.session import probe


def main() -> int:
    """Run the probes. Return the exit status: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python3 -m fineserve_calibrate.probes")
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--only")
    given = parser.parse_args()
    try:
        folder = probe(given.gpu, given.quick, given.out, given.model, given.only, Console())
    except (ProbeError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    print(f"finished parts: {folder / 'parts'}; fineserve-calibrate report {folder} makes tables of them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
