"""From a document to the typed file; pydantic's errors as lines for people."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fineserve_sim.experiment.file.document import Document, KeyPath
from fineserve_sim.experiment.file.errors import ConfigError, nearest
from fineserve_sim.experiment.file.schema import ExperimentFile

_MISSING = "missing; this key is required"
_PHRASES = {
    "List should ": "must ",
    "String should ": "must ",
    "Input should be ": "must be ",
    "Input should ": "must ",
    "a valid dictionary": "a mapping",
    "a valid list": "a list",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "a text",
    " after validation, not 0": "",
}
"""Pydantic's words and ours."""


def validate(document: Document) -> ExperimentFile:
    """The typed file.

    Raises ConfigError, at its line, for the first mistake; a misspelt key comes before the key that it left missing.
    """
    try:
        return ExperimentFile.model_validate(document.data)
    except ValidationError as problem:
        details = sorted(problem.errors(), key=lambda detail: detail["type"] != "unknown_key")
        raise as_config_error(document, (), details[0]) from None


def as_config_error(document: Document, at: KeyPath, detail: ErrorDetails) -> ConfigError:
    """One pydantic error of the value at ``at`` as one line at its place in the document."""
    path = _real_path(document, at, detail)
    context, given = detail.get("ctx", {}), detail["input"]
    match detail["type"]:
        case "unknown_key":
            hint = context["hint"]
            path, problem = (*path, context["key"]), hint if hint.startswith("not ") else f"unknown key; {hint}"
        case "missing":
            problem = _MISSING
        case "model_type" | "model_attributes_type":
            problem = f"must be a mapping of keys and values{_given(given)}"
        case "union_tag_not_found":
            path, problem = _without_tag(path, _key(context["discriminator"]), given)
        case "union_tag_invalid":
            path = (*path, _key(context["discriminator"]))
            problem = _unknown_value(context["tag"], context["expected_tags"])
        case "literal_error":
            problem = _unknown_value(given, context["expected"])
        case _:
            problem = _in_our_words(detail["msg"]) + _given(given)
    return document.error(path, problem)


def _without_tag(path: KeyPath, key: str, given: Any) -> tuple[KeyPath, str]:
    """The key that says which kind of mapping this is has not been found: missing, or misspelt."""
    misspelt = get_close_matches(key, list(given), n=1) if isinstance(given, dict) else []
    if misspelt:
        return (*path, misspelt[0]), f'unknown key; did you mean "{key}"?'
    return (*path, key), _MISSING


def _key(quoted: Any) -> str:
    return str(quoted).strip("'")


def _unknown_value(given: object, listed: str) -> str:
    names = [name.strip(" '") for name in listed.replace(" or ", ",").split(",")]
    return f"unknown value {given!r}; {nearest(given, names)}"


def _in_our_words(message: str) -> str:
    for theirs, ours in _PHRASES.items():
        message = message.replace(theirs, ours)
    return message[0].lower() + message[1:]


def _given(value: Any) -> str:
    if value is None:
        return ", not nothing"
    return "" if isinstance(value, dict | list | BaseModel) else f", not {value!r}"


def _real_path(document: Document, at: KeyPath, detail: ErrorDetails) -> KeyPath:
    """The error's location without the tags that unions put into it."""
    value: Any = document.data
    for part in at:
        value = value[part]
    path: KeyPath = at
    for part in detail["loc"]:
        inside = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if inside:
            value = value[part]
            path = (*path, part)
    if detail["type"] in ("missing", "extra_forbidden") and path[-1:] != detail["loc"][-1:]:
        path = (*path, detail["loc"][-1])
    return path
