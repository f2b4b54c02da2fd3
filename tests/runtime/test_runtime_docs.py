"""docs/runtime.md is true of the code: commands parse, every key of the section has its row."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from fineserve_runtime.cli import app
from fineserve_runtime.config import ApiKey, ModelFiles, RuntimeSection, TlsFiles
from fineserve_runtime.server.limits import HttpLimits

PAGE = (Path(__file__).parents[2] / "docs" / "runtime.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(?:\$ )?fineserve-run (.*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_shown_parses(line: str) -> None:
    group: Any = typer.main.get_command(app)
    for command in group.commands.values():
        command.callback = lambda **_: None
    group.main(args=shlex.split(line), prog_name="fineserve-run", standalone_mode=False)


def test_all_commands_are_shown() -> None:
    group: Any = typer.main.get_command(app)
    assert {line.split()[0] for line in COMMANDS} == set(group.commands)


def row_of(name: str) -> str:
    """The row of a table whose first cell names the key."""
    rows = [row for row in PAGE.splitlines() if row.startswith("| `") and f"`{name}`" in row.split("|")[1]]
    assert rows, name
    return rows[0]


def written(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_every_key_of_the_section_is_described() -> None:
    for section in (RuntimeSection, HttpLimits):
        for name, field in section.model_fields.items():
            row = row_of(name)
            plain = isinstance(field.default, bool | int | float | str)
            assert not plain or written(field.default) in row.split("|")[2], name
    for name in (*ModelFiles.model_fields, *ApiKey.model_fields, *TlsFiles.model_fields):
        assert f"`{name}`" in PAGE or re.search(rf"`[^`]*\b{name}\b[^`]*`", PAGE), name
