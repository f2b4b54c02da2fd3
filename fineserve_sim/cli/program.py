"""What the project's programs have in common: ``-h``, ``--version``, and one line on stderr for bad input."""

# No postponed annotations here: typer could not look up the callback that an option of ``program`` names.

import re
import sys
from typing import Annotated, Any

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


_PHRASES = {
    "Invalid value for ": "",
    "Value error, ": "",
    "Input should be ": "must be ",
    "a valid integer, unable to parse string as an integer": "a whole number",
    "a valid number, unable to parse string as a number": "a number",
}
"""The parser's words and ours."""


def run(app: typer.Typer, name: str, *expected: type[Exception]) -> None:
    """The program until it ends. ValueError, OSError and what else is ``expected`` are errors for people, as are options and
    arguments that are none: exit code 2."""
    for_people: tuple[type[Exception], ...] = (ValueError, *expected)
    try:
        code = app(prog_name=name, standalone_mode=False)
    except for_people as problem:
        _fail(name, str(problem))
    except OSError as problem:
        _fail(name, f"{problem.filename}: {problem.strerror}" if problem.filename else str(problem))
    except Exception as problem:
        if not hasattr(problem, "format_message"):  # the parser's own errors, whose class moves between its versions
            raise
        _fail(name, _usage(problem))
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _usage(problem: Any) -> str:
    """What is wrong with the words of a command, in one line, and where they are explained. Nothing given: the help."""
    message, context = problem.format_message(), getattr(problem, "ctx", None)
    if type(problem).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)
        sys.exit(2)
    for theirs, ours in _PHRASES.items():
        message = message.replace(theirs, ours)
    see = f"; see {context.command_path} --help" if context else ""
    return re.sub(r"'(-[\w-]+)'", r"\1", message).rstrip(".") + see


def _fail(name: str, problem: str) -> None:
    print(f"{name}: error: {' '.join(problem.split())}", file=sys.stderr)
    sys.exit(2)
