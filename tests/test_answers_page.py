"""docs/answers.md: its trace, its commands and what they print are those of the program."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "answers.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str) -> str:
    """What a command of the page prints on stdout."""
    from fineserve_sim.cli import main

    monkeypatch.setattr(sys, "argv", [*shlex.split(line), *(["--jobs", "1"] if "explain" not in line else [])])
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    return capsys.readouterr().out


def plain(text: str) -> list[str]:
    """Lines without the spaces that end them."""
    return [line.rstrip() for line in text.strip().splitlines()]


def test_the_page_shows_what_its_commands_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "COLUMNS", "TERMINAL_WIDTH"):
        monkeypatch.delenv(name, raising=False)
    (recipe,) = (body for language, body in BLOCKS if language == "python")
    exec(compile(recipe, str(PAGE), "exec"), {})
    shown, checked = "", 0
    for language, body in BLOCKS:
        if language == "sh":
            shown = [printed(monkeypatch, capsys, line) for line in body.strip().splitlines()][-1]
        elif language == "text":
            assert plain(body) == plain(shown)
            checked += 1
    assert checked == 3
