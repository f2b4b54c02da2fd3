"""What the project's programs have in common: ``-h``, ``--version``, and one line on stderr for bad input."""

# No postponed annotations here: typer could not look up the callback that an option of ``program`` names.

import sys
from typing import Annotated

import typer


def program(name: str, version: str, *, help: str, epilog: str) -> typer.Typer:
    """An empty command line called ``name``; commands are added to it."""
    app = typer.Typer(
        name=name,
        help=help,
        epilog=epilog,
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )

    def print_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"{name} {version}")
            raise typer.Exit

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and leave.")
        ] = False,
    ) -> None:
        """Options before the command."""

    return app


def run(app: typer.Typer, name: str, *expected: type[Exception]) -> None:
    """The program until it ends. ValueError, OSError and what else is ``expected`` are errors for people: exit code 2."""
    for_people: tuple[type[Exception], ...] = (ValueError, *expected)
    try:
        app(prog_name=name)
    except for_people as problem:
        _fail(name, str(problem))
    except OSError as problem:
        _fail(name, f"{problem.filename}: {problem.strerror}" if problem.filename else str(problem))


def _fail(name: str, problem: str) -> None:
    print(f"{name}: error: {' '.join(problem.split())}", file=sys.stderr)
    sys.exit(2)
