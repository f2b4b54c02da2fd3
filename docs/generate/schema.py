"""The experiment file, key by key: types, ranges and defaults from its schema, meanings from ``keys.yaml``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from docs.generate.markdown import number, table
from fineserve_sim.experiment.file.schema import ExperimentFile

KEYS = Path(__file__).with_name("keys.yaml")
BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
PLAIN = {"string": "text", "boolean": "true or false", "integer": "whole number", "number": "number"}

Schema = Mapping[str, Any]


def experiment_file() -> str:
    """A table for the file and one for each part of it, in the order in which ``keys.yaml`` has them."""
    whole = ExperimentFile.model_json_schema()
    parts = {"ExperimentFile": whole} | whole["$defs"]
    meanings = yaml.safe_load(KEYS.read_text(encoding="utf-8"))
    headings = {name: part["heading"] for name, part in meanings.items()}
    return "\n\n".join(_part(parts[name], part, headings) for name, part in meanings.items())


def undescribed() -> dict[str, set[str]]:
    """Keys without a meaning, and meanings without a key, by part."""
    whole = ExperimentFile.model_json_schema()
    parts = {"ExperimentFile": whole} | whole["$defs"]
    meanings = {name: set(part["keys"]) for name, part in yaml.safe_load(KEYS.read_text(encoding="utf-8")).items()}
    in_words = {"Sharing"}  # a file has it in words of its own
    keys = {name: set(part["properties"]) for name, part in parts.items() if name not in in_words}
    found = {name: keys.get(name, set()) ^ meanings.get(name, set()) for name in keys | meanings}
    return {name: odd for name, odd in found.items() if odd}


def _part(part: Schema, said: Schema, headings: Mapping[str, str]) -> str:
    required = part.get("required", [])
    rows = []
    for key, field in part["properties"].items():
        default = "required" if key in required else _default(field.get("default"))
        rows.append((f"`{key}`", _kind(field, headings), default, said["keys"][key]))
    return f"### {said['heading']}\n\n{said['says']}\n\n" + table(("key", "takes", "default", "meaning"), rows)


def _kind(field: Schema, headings: Mapping[str, str]) -> str:
    """What a key takes, in words."""
    options = [_one(option, headings) for option in _options(field) if option.get("type") != "null"]
    return ", or ".join(dict.fromkeys(options))


def _options(field: Schema) -> Iterator[Schema]:
    for group in ("anyOf", "oneOf"):
        if group in field:
            for option in field[group]:
                yield from _options(option)
            return
    yield field


def _one(field: Schema, headings: Mapping[str, str]) -> str:
    if "$ref" in field:
        return _reference(field["$ref"].rsplit("/", 1)[-1], headings)
    if "const" in field or "enum" in field:
        return " or ".join(f"`{choice}`" for choice in field.get("enum", [field.get("const")]))
    kind = field.get("type")
    if kind == "array":
        return f"list of {_kind(field['items'], headings) or 'values'}"
    if kind == "object":
        values = field.get("additionalProperties")
        inner = _kind(values, headings) if isinstance(values, dict) else ""
        return f"mapping of names to {inner}" if inner else "mapping"
    if kind is None:
        return "value" if not field.keys() - {"title", "default"} else ""
    bounds = [f"{sign} {number(field[bound])}" for bound, sign in BOUNDS.items() if bound in field]
    return " ".join([PLAIN[kind], *bounds])


def _reference(name: str, headings: Mapping[str, str]) -> str:
    if name == "Sharing":
        return "[a way of sharing](../howto/share.md)"
    return f"[{headings[name]}](#{re.sub(r'[.,]', '', headings[name].lower()).replace(' ', '-')})"


def _default(value: Any) -> str:
    if value is None or value in ({}, []):
        return "none"
    if isinstance(value, dict):
        return "as below"
    if isinstance(value, str):
        return f"`{value}`" if value else "empty"
    return number(value)
