"""``fineserve-run serve``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fineserve_runtime.cli.options import FileArgument, SetOption, SystemOption, pairs

if TYPE_CHECKING:
    from fineserve_runtime.config import RuntimeFile


def serve(
    file: FileArgument,
    *,
    system: SystemOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default=False)] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on.", show_default=False)] = None,
    decisions: Annotated[
        Path | None, typer.Option(metavar="LOG", help="Log every event and decision there.", show_default=False)
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Serve the models of FILE behind one OpenAI-compatible server, until SIGTERM or Ctrl-C."""
    from fineserve_runtime.config import load_file
    from fineserve_runtime.serve import run_server

    changes: list[tuple[str, Any, str]] = []
    if host is not None:
        changes.append(("runtime.host", host, "--host"))
    if port is not None:
        changes.append(("runtime.port", port, "--port"))
    if decisions is not None:
        changes.append(("runtime.decisions", str(decisions.resolve()), "--decisions"))
    loaded: RuntimeFile = load_file(file, pairs(overrides), changes)
    run_server(loaded, system)
