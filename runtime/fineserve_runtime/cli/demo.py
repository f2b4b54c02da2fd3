"""``fineserve-run demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    folder: Annotated[Path | None, typer.Option(help="Where models and file are made.", show_default=False)] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, help="Send so many requests to it, print what came of them, and leave.", show_default=False
        ),
    ] = None,
) -> None:
    """Serve two tiny models, one in BF16 and one with an FP8 KV cache, made on the spot: no download, no GPU.

    Their weights are random, and so are their answers. Memory, scheduling and server are real.
    """
    from fineserve_runtime.demo import make_demo, serve_demo

    where = folder or Path.home() / ".cache" / "fineserve" / "demo"
    file = make_demo(where, port)
    typer.echo(f"The file of this demo: {file}", err=True)
    serve_demo(file, requests)
