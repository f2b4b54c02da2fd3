"""The commands put together."""

from __future__ import annotations

from typing import Annotated

import typer

from fineserve_runtime import __version__
from fineserve_runtime.cli import check, demo, replay, serve, top

app = typer.Typer(
    name="fineserve-run",
    help="Serve many mixed-precision models on shared devices: FineServe's policies over real vLLM engines.",
    epilog="Start with: fineserve-run check, then fineserve-run demo",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(serve.serve)
app.command()(replay.replay)
app.command()(top.top)
app.command()(check.check)
app.command()(demo.demo)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fineserve-run {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options before the command."""
