"""The commands put together."""

from __future__ import annotations

from typing import Annotated

import typer

from fineserve_sim import __version__
from fineserve_sim.cli import catalog, experiments, explain, reproduce, size, traces

app = typer.Typer(
    name="fineserve-sim",
    help="Simulate and compare policies for serving many mixed-precision language models on shared GPUs.",
    epilog="Start with: fineserve-sim list systems, then fineserve-sim run experiments/fig10.yaml --quick",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(traces.app, name="traces")
for register in (experiments.register, explain.register, reproduce.register, size.register, catalog.register):
    register(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fineserve-sim {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options before the command."""
