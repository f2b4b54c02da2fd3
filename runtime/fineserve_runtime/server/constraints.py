"""How deep a constraint is nested. vLLM's grammar library takes time that grows with the cube of it: a JSON schema of 900
levels, 9 KB of text, takes it more than 30 s, and so does a regular expression of 8,000."""

from __future__ import annotations

import json
import math
from typing import Any

COUNTS = 64 * 2**10
"""The most that a JSON schema may count to. The library writes repetitions out: for 10**9 items it takes minutes, and a request
that cannot be ended holds up all others with constraints."""

_COUNTING = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}

LEVELS = 64
"""With so many it takes seconds at most for what fits into a constraint, beside the engine's own thread (vllm_grammars.py)."""


def levels(kind: str, text: str) -> float:
    """The nesting of a JSON schema with the regular expressions in it, or of a regular expression. Other kinds have 0: their
    nesting costs little, and what an ambiguous one costs shows only as it is followed."""
    if kind == "regex":
        return _groups(text)
    if kind != "json":
        return 0
    try:
        return _values(json.loads(text))
    except RecursionError:
        return math.inf
    except ValueError:
        return 0  # no JSON, as the engine will say


def _values(value: Any) -> int:
    """Levels of lists and objects, and of the deepest text as a regular expression."""
    deepest, here = 0, [value]
    levels = 0
    while here:
        deepest = max([deepest, *(_groups(each) for each in here if isinstance(each, str))])
        here = [part for each in here for part in _parts(each)]
        levels += bool(here)
    return max(levels, deepest)


def largest_count(kind: str, text: str) -> float:
    """The largest number of items, characters or properties that a JSON schema has; 0 for other constraints."""
    try:
        here = [json.loads(text)] if kind == "json" else []
    except (ValueError, RecursionError):
        return 0
    largest = 0.0
    while here:
        counts = [each[key] for each in here if isinstance(each, dict) for key in _COUNTING & each.keys()]
        largest = max([largest, *(count for count in counts if isinstance(count, int | float))])
        here = [part for each in here for part in _parts(each)]
    return largest


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []


def _groups(pattern: str) -> int:
    """Groups within groups of a regular expression; brackets in classes and behind a backslash are none."""
    deepest = depth = at = 0
    in_class = False
    while at < len(pattern):
        match pattern[at]:
            case "\\":
                at += 1
            case "]":
                in_class = False
            case "[":
                in_class = True
            case "(" if not in_class:
                depth += 1
                deepest = max(deepest, depth)
            case ")" if not in_class:
                depth -= 1
        at += 1
    return deepest
