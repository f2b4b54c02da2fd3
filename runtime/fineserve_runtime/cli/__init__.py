"""The command line, ``fineserve-run``. Output and exit codes are as those of ``fineserve-sim``."""

from __future__ import annotations

import sys

from fineserve_runtime.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the console script."""
    try:
        app(prog_name="fineserve-run")
    except (ValueError, RuntimeError) as problem:
        _fail(str(problem))
    except OSError as problem:
        _fail(f"{problem.filename}: {problem.strerror}" if problem.filename else str(problem))


def _fail(problem: str) -> None:
    print(f"fineserve-run: error: {' '.join(problem.split())}", file=sys.stderr)
    sys.exit(2)
