"""Tables and words in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()) -> str:
    """A table; the columns named in ``right`` hold numbers."""
    lines = [f"| {' | '.join(headers)} |", f"|{'|'.join('---:' if name in right else '---' for name in headers)}|"]
    lines += [f"| {' | '.join(map(cell, row))} |" for row in rows]
    return "\n".join(lines)


def cell(value: object) -> str:
    """One line without a bare ``|``."""
    return " ".join(str(value).split()).replace("|", "\\|")


def words(docstring: str) -> str:
    """A docstring with Markdown's backticks, each paragraph a line."""
    paragraphs = re.split(r"\n\s*\n", docstring.replace("``", "`"))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def number(value: float) -> str:
    """Thousands in groups, no digits that say nothing: 536,870,912, 0.9, 2.5e+10."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}"
