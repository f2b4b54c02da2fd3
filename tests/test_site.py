"""The documentation as a site: what comes from the code is as the code has it, what commands print is as shown, links hold."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate import DOCS, contention, pages, schema, systems, written
from docs.generate.shown import run_page, showing

ROOT = DOCS.parent


def name(path: Path) -> str:
    return str(path.relative_to(DOCS) if path.is_relative_to(DOCS) else path.name)


@pytest.mark.parametrize("page", pages(), ids=name)
def test_generated_parts_are_what_the_code_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert written(text) == text, "python3 dev.py docs renews the page"


def test_every_key_and_every_option_has_a_meaning() -> None:
    assert schema.undescribed() == {}
    assert systems.undescribed() == set()


@pytest.mark.parametrize("page", showing(), ids=name)
def test_pages_show_what_their_commands_print(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("FORCE_COLOR", "COLUMNS", "TERMINAL_WIDTH"):
        monkeypatch.delenv(variable, raising=False)
    found = list(run_page(page, tmp_path))
    assert found
    for one in found:
        assert one.agrees(), f"{one.command}\nprints\n{one.printed}\npython -m docs.generate --outputs renews the page"


def test_pages_with_outputs_are_many() -> None:
    assert {"tutorial.md", "howto/share.md", "howto/troubleshooting.md"} <= set(map(name, showing()))


@pytest.mark.slow
def test_the_first_row_of_contention_is_what_runs_give() -> None:
    """README.md's caption has its numbers, too."""
    row = contention.row_of(next(iter(contention.WAYS)))
    assert contention.read("contention.csv")[0] == row, "python -m docs.generate --sharing renews the numbers"


def test_the_site_builds_and_asks_nobody(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed; requirements-dev.lock has it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    made = list((tmp_path / "site").rglob("*.html"))
    assert len(made) > 30
    for path in made:
        fetched = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', path.read_text(encoding="utf-8")
        )
        assert not fetched, f"{path.name} asks for {fetched[0]}"
