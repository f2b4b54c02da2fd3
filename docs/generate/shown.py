"""What the commands of a page print, beside what the page shows.

A page's files come first: a fence after a line that ends with its name in backticks and a colon. Then each ``python`` fence
is run, and each ``sh`` fence that a ``text`` fence follows, all of a page in one folder. A line ``...`` in what is shown stands
for any lines.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from unittest import mock

FILE = re.compile(r"`([\w./-]+)`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_JOBS = ("run", "compare", "size")


DOCS = Path(__file__).parents[1]
ELLIPSIS = "..."


class Shown(NamedTuple):
    """Commands, the text that the page shows for the last of them, and what that printed."""

    command: str
    shown: str
    printed: str

    def agrees(self) -> bool:
        """Whether the page shows what was printed."""
        lines = [line.rstrip() for line in self.shown.strip().splitlines()]
        pattern = "\n".join(".*?" if line == ELLIPSIS else re.escape(line) for line in lines)
        printed = "\n".join(line.rstrip() for line in self.printed.strip().splitlines())
        return re.fullmatch(pattern, printed, re.DOTALL) is not None

    def renewed(self) -> str:
        """What the page would have to show: as many lines before and after the ellipsis as now."""
        shown, printed = self.shown.strip().splitlines(), [line.rstrip() for line in self.printed.strip().splitlines()]
        if ELLIPSIS not in shown:
            return "\n".join(printed) + "\n"
        place = shown.index(ELLIPSIS)
        rest = len(shown) - place - 1
        return "\n".join([*printed[:place], ELLIPSIS, *printed[len(printed) - rest :]]) + "\n"


def showing() -> list[Path]:
    """The pages for users that show outputs; other pages with outputs have tests of their own."""
    found = (DOCS / "answers.md", DOCS / "tutorial.md", *sorted((DOCS / "howto").glob("*.md")))
    return [path for path in found if any(language == "text" for language, _ in FENCE.findall(path.read_text("utf-8")))]


def renew(page: Path) -> None:
    """Write what the page's commands print now. Read what its prose says of it afterwards."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for one in run_page(page, Path(folder)):
            text = text.replace(f"```text\n{one.shown}```", f"```text\n{one.renewed()}```", 1)
    page.write_text(text, encoding="utf-8")


def run_page(page: Path, folder: Path) -> Iterator[Shown]:
    """Run the page's commands in ``folder``, which must be the current one."""
    text = page.read_text(encoding="utf-8")
    for name, body in FILE.findall(text):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(body, encoding="utf-8")
    for (language, body), (following, shown) in pairwise([*FENCE.findall(text), ("", "")]):
        if language == "python":
            exec(compile(body, str(page), "exec"), {})
        if language == "sh" and following == "text":
            yield Shown(body.strip(), shown, [printed(line) for line in body.strip().splitlines()][-1])


def printed(line: str) -> str:
    """Everything that a command of ``fineserve-sim`` prints, without progress: stdout, or the error."""
    from fineserve_sim.cli import main

    words = shlex.split(line)
    words += ["--jobs", "1"] if words[1] in WITH_JOBS else []
    out, errors = StringIO(), StringIO()
    with mock.patch.object(sys, "argv", words), redirect_stdout(out), redirect_stderr(errors):
        try:
            main()
        except SystemExit as left:
            if left.code:
                return errors.getvalue()
    return out.getvalue()
