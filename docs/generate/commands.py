"""The three programs, command by command, as typer knows them."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import typer

from docs.generate.markdown import table, words

UNSHOWN = {"help", "install_completion", "show_completion"}
COMMON = {"--out", "--jobs", "--executor", "--json"}
"""Options that the page explains once for all commands, where they are the common ones."""


def fineserve_sim() -> str:
    from fineserve_sim.cli import app

    return _program("fineserve-sim", app)


def fineserve_calibrate() -> str:
    from fineserve_calibrate.cli import app

    return _program("fineserve-calibrate", app)


def fineserve_run() -> str:
    from fineserve_runtime.cli import app

    return _program("fineserve-run", app)


def _program(name: str, app: typer.Typer) -> str:
    return "\n\n".join(_command(path, command) for path, command in _walk(name, typer.main.get_command(app)))


def _walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Every command with its whole name; a group itself where it has options of its own."""
    if any(_shown(parameter) for parameter in command.params) or not hasattr(command, "commands"):
        yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from _walk(f"{path} {name}", child)


def _shown(parameter: Any) -> bool:
    return parameter.name not in UNSHOWN and not getattr(parameter, "hidden", False) and not _common(parameter)


def _common(parameter: Any) -> bool:
    """Whether it is one of the options that several commands of the simulator share, word for word."""
    from fineserve_sim.cli.console import ExecutorOption, JobsOption, JsonOption, OutOption

    shared = [get_args(option)[1] for option in (ExecutorOption, JobsOption, JsonOption, OutOption)]
    return bool(COMMON & set(parameter.opts)) and parameter.help in [option.help for option in shared]


def _command(path: str, command: Any) -> str:
    shown = [parameter for parameter in command.params if _shown(parameter)]
    pieces = [f"### {path}", words(command.help or "")]
    if shown:
        pieces.append(table(("argument or option", "meaning", "default"), map(_row, shown)))
    return "\n\n".join(piece for piece in pieces if piece)


def _row(parameter: Any) -> tuple[str, str, str]:
    argument = not parameter.opts[0].startswith("-")
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    value = "" if argument or getattr(parameter, "is_flag", False) else f" {parameter.metavar or _type(parameter)}"
    name = f"`{parameter.metavar or parameter.name.upper()}`" if argument else names + value
    repeats = "; may be repeated" if parameter.multiple and "repeat" not in (parameter.help or "") else ""
    return name, f"{(parameter.help or '').rstrip('.')}{repeats}", _default(parameter)


def _type(parameter: Any) -> str:
    """What an option takes, where it has no word of its own."""
    kind = parameter.type_descriptor.annotation
    inner = next(iter(get_args(kind)), kind)
    if issubclass(inner, Enum):
        return "|".join(str(member.value) for member in inner)
    return {int: "N", float: "NUMBER", Path: "PATH"}.get(inner, "TEXT")


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if callable(value) or value in (None, False, [], ()) or getattr(parameter, "is_flag", False):
        return "on" if value is True else ""
    return f"`{value.value if isinstance(value, Enum) else value}`"
