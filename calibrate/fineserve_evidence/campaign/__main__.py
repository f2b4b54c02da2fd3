"""``python3 -m fineserve_evidence.campaign --gpu NAME``: measure and pack, and no more.

A GPU machine may have torch and vLLM, but not all that the project needs. Beside them this takes numpy, pydantic, PyYAML and
rich. ``fineserve-calibrate report ARCHIVE`` makes tables and report of what it wrote, on any machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fineserve_calibrate.probes.schema import ProbeError

from fineserve_evidence.campaign import MINUTES
from fineserve_evidence.campaign.command import Request, campaign, plan_lines, planned


def main() -> int:
    """Run a campaign. Return the exit status: 0; 2 with one line on stderr; 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python3 -m fineserve_evidence.campaign")
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only")
    parser.add_argument("--retry", action="store_true")
    parser.add_argument("--plan", action="store_true")
    given = parser.parse_args()
    request = Request(given.gpu, given.minutes, given.out, given.only, given.retry)
    try:
        if given.plan:
            print("\n".join(plan_lines(planned(request)[2])))
        else:
            print(f"packed {campaign(request, lambda text: print(text, flush=True))}")
    except (ProbeError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
