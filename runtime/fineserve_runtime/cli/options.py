"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="Experiment in YAML with a section runtime.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Replace a value of the file; may be repeated.", show_default=False
    ),
]
SystemOption = Annotated[
    str | None, typer.Option("--system", "-s", help="System of the file; the first if not given.", show_default=False)
]


def pairs(texts: list[str] | None) -> list[tuple[str, str]]:
    """Raises ValueError for what is no KEY=VALUE."""
    found = []
    for text in texts or ():
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise ValueError(f"--set {text}: expected KEY=VALUE, such as runtime.port=9000")
        found.append((key, value))
    return found
