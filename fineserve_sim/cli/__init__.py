"""The command line, ``fineserve-sim``.

Results go to stdout, everything about the way there (what is run, progress, errors) to stderr. Exit codes: 0 done,
1 claims without their experiment (``reproduce``), 2 bad input (one line on stderr), 130 interrupted. Nothing heavy is
imported before a command needs it, so that ``--help`` is quick.
"""

from __future__ import annotations

from fineserve_sim.cli.app import app
from fineserve_sim.cli.program import run

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the console script."""
    run(app, "fineserve-sim")
