"""The command line, ``fineserve-run``. Output and exit codes follow ``fineserve-sim``."""

from __future__ import annotations

from fineserve_runtime.cli.app import app
from fineserve_sim.cli.program import run

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the console script."""
    run(app, "fineserve-run", RuntimeError)
