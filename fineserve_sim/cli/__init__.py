"""The command line, ``fineserve-sim``.

Results go to stdout, everything about the way there (what is run, progress, errors) to stderr. Exit codes: 0 done,
2 bad input (one line on stderr), 130 interrupted. Nothing heavy is imported before a command needs it, so that
``--help`` is quick.
"""

from __future__ import annotations

import sys

from fineserve_sim.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the console script."""
    try:
        app(prog_name="fineserve-sim")
    except ValueError as problem:
        _fail(str(problem))
    except OSError as problem:
        _fail(f"{problem.filename}: {problem.strerror}" if problem.filename else str(problem))


def _fail(problem: str) -> None:
    print(f"fineserve-sim: error: {' '.join(problem.split())}", file=sys.stderr)
    sys.exit(2)
