"""Plain data of summary.json as HTML: mappings as definitions, lists of them as tables, numbers in the units of their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fineserve_sim.experiment.show.labels import number, quantity
from fineserve_sim.experiment.show.page.html import Html, Row, joined, table, tag


def shown(value: Any) -> Html:
    """Any value: a mapping as definitions, a list of mappings as a table, another list as points, the rest as text."""
    if isinstance(value, Mapping):
        there = {key: item for key, item in value.items() if item not in (None, [], {})}
        parts = (joined([tag("dt", quantity(key).text), tag("dd", _item(key, item))]) for key, item in there.items())
        return tag("dl", *parts)
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return records(value, [{} for _ in value])
    if isinstance(value, list):
        return tag("ul", *(tag("li", shown(item)) for item in value))
    return tag("p", plain_text(value))


def _item(key: str, value: Any) -> Html:
    return shown(value) if isinstance(value, Mapping | list) else tag("span", _in_unit(key, value))


def records(rows: Sequence[Mapping[str, Any]], data: Sequence[Mapping[str, object]]) -> Html:
    """Mappings as a table, with what the page filters each by. A mapping inside one gets a column a key."""
    flat = [dict(_flat(row)) for row in rows]
    keys = list(dict.fromkeys(key for row in flat for key in row))
    numeric = [place for place, key in enumerate(keys) if any(_is_number(row.get(key)) for row in flat)]
    texts = [Row([_in_unit(key, row.get(key)) for key in keys], own) for row, own in zip(flat, data, strict=True)]
    return table([quantity(key).text for key in keys], texts, numeric)


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}_{inner}", item) for inner, item in value.items())
        else:
            yield key, value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _in_unit(key: str, value: Any) -> str:
    return number(value * quantity(key).scale) if _is_number(value) else plain_text(value)


def plain_text(value: Any) -> str:
    """A value in words: items of lists and mappings with commas."""
    if isinstance(value, list | tuple):
        return ", ".join(map(plain_text, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain_text(item)}" for key, item in value.items())
    return number(value)
