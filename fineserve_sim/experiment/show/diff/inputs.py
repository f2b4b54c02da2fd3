"""The inputs of two experiments: keys of their files that differ, and the versions that they ran on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fineserve_sim.experiment.file.document import read_yaml

ABSENT = None
_NAMES = ("id", "name", "what")
"""Items of a list are matched by the first of these that they have, else by their place."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key and its value on either side, None where it is not there."""

    key: str
    a: Any
    b: Any


def changed_inputs(a: Path, b: Path) -> list[Change]:
    """Dotted keys of the files as they were run, then ``environment.``: versions and the digest of our sources."""
    files = [dict(_flat("", read_yaml(folder / "resolved.yaml").data)) for folder in (a, b)]
    environments = [
        dict(_flat("environment", json.loads((folder / "environment.json").read_text(encoding="utf-8"))))
        for folder in (a, b)
    ]
    return [change for left, right in (files, environments) for change in _changes(left, right)]


def _changes(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Change]:
    for key in dict.fromkeys([*a, *b]):
        if a.get(key, ABSENT) != b.get(key, ABSENT):
            yield Change(key, a.get(key), b.get(key))


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every plain value under its dotted key; a list of plain values is one value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for place, item in enumerate(value):
            yield from _flat(f"{path}.{_name(item, place)}", item)
    else:
        yield path, value


def _name(item: Any, place: int) -> str:
    named = (str(item[key]) for key in _NAMES if key in item) if isinstance(item, dict) else ()
    return next(iter(named), str(place))
