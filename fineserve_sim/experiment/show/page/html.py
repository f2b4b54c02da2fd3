"""HTML from Python: every text is escaped unless it is ``Html`` already."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

_VOID = frozenset({"meta", "input", "br"})


class Html(str):
    """Text that is markup."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Html:
    """An element. Attributes whose name Python has taken end in an underscore, an underscore inside is a hyphen; None and False
    leave one out, True gives it no value."""
    given = "".join(
        _attribute(key, value) for key, value in attributes.items() if value is not None and value is not False
    )
    inner = "" if name in _VOID else f"{joined(children)}</{name}>"
    return Html(f"<{name}{given}>{inner}")


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


def joined(children: Iterable[str]) -> Html:
    """The children one after the other."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children))


class Row(NamedTuple):
    """A row of a table; ``data`` goes into its data attributes, by which the page filters."""

    cells: Sequence[str]
    data: Mapping[str, object] = {}


def table(headers: Sequence[str], rows: Iterable[Row], numeric: Collection[int] = ()) -> Html:
    """A table in a box that scrolls by itself where the screen is narrow; columns of ``numeric`` are set right."""

    def cells(name: str, texts: Sequence[str]) -> Html:
        return joined(tag(name, text, class_="n" if index in numeric else None) for index, text in enumerate(texts))

    body = [
        tag("tr", cells("td", row.cells), **{f"data_{key}": value for key, value in row.data.items()}) for row in rows
    ]
    head = tag("thead", tag("tr", cells("th", headers)))
    return tag("div", tag("table", head, tag("tbody", *body)), class_="wide")
