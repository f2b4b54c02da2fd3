"""``fineserve-run steps``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fineserve_runtime.cli.options import FileArgument, SetOption, SystemOption, pairs


def steps(
    file: FileArgument,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="TABLE", help="The table, in Parquet.")] = Path(
        "steps.parquet"
    ),
    system: SystemOption = None,
    overrides: SetOption = None,
) -> None:
    """Time the steps of FILE's engines, alone and beside one another, as a table for the simulator (engine.step_times).

    The file's own step_times are not read.
    """
    from fineserve_runtime.config import load_file
    from fineserve_runtime.serve import served_scenario
    from fineserve_runtime.step_probe import probe_steps, write_table

    loaded = load_file(file, pairs(overrides), [("engine.step_times", None, "fineserve-run steps")], serving=False)
    rows = probe_steps(loaded, served_scenario(loaded, system))
    write_table(rows, out)
    typer.echo(f"{out}: {len(rows)} kinds of steps, {sum(row.repeats for row in rows)} steps")
