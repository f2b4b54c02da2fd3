"""docs/runtime.md is true of the code: commands parse, every key of the section has its row."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from fineserve_runtime.cli import app
from fineserve_runtime.config import ModelFiles, RuntimeSection

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


def test_every_key_of_the_section_is_described() -> None:
    for name, field in RuntimeSection.model_fields.items():
        row = next(
            (row for row in PAGE.splitlines() if row.startswith("| `") and f"`{name}`" in row.split("|")[1]), None
        )
        assert row is not None, name
        if not field.is_required() and field.default is not None:
            value = (
                str(field.default).lower()
                if isinstance(field.default, bool)
                else f"{field.default:g}"
                if isinstance(field.default, float)
                else str(field.default)
            )
            assert value in row.split("|")[2], name
    for name in ModelFiles.model_fields:
        assert f"`{name}`" in PAGE, name
