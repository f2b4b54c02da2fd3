"""The systems of a file: built-in ones by name, and variants of them with some axes changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from fineserve_sim.experiment.file import schema
from fineserve_sim.experiment.file.document import Document, KeyPath
from fineserve_sim.experiment.file.errors import nearest
from fineserve_sim.experiment.file.messages import as_config_error
from fineserve_sim.systems import SystemSpec, load_systems

_AXES = tuple(
    axis
    for axis in SystemSpec.model_fields
    if axis in schema.SystemVariant.model_fields and axis not in ("name", "title", "sharing")
)


def systems_of(document: Document, file: schema.ExperimentFile) -> dict[str, SystemSpec]:
    """The file's systems first, then all built-in ones, which references may name. Raises ConfigError."""
    found: dict[str, SystemSpec] = {}
    for index, item in enumerate(file.systems):
        path: KeyPath = ("systems", index)
        system = _built_in(document, path, item) if isinstance(item, str) else _variant(document, path, item)
        if system.name in found:
            raise document.error(path, f'a second system is called "{system.name}"; give it another name')
        found[system.name] = system
    return found | {name: system for name, system in load_systems().items() if name not in found}


def _built_in(document: Document, path: KeyPath, name: str) -> SystemSpec:
    systems = load_systems()
    if name not in systems:
        raise document.error(path, f'unknown system "{name}"; {nearest(name, systems)}')
    return systems[name]


def _variant(document: Document, path: KeyPath, item: schema.SystemVariant) -> SystemSpec:
    """The base system with the given axes: options of the same policy are added, another policy replaces it."""
    base = _built_in(document, (*path, "base"), item.base)
    raw = base.model_dump() | {"name": item.name, "title": item.title or item.name}
    if item.sharing is not None:
        raw["sharing"] = item.sharing
    for axis in _AXES:
        given = getattr(item, axis)
        if given is None:
            continue
        present = raw[axis] or {"policy": next(iter(_policies(axis)))}
        policy = given.get("policy", present["policy"])
        _check_options(document, (*path, axis), axis, policy, given)
        raw[axis] = (present if policy == present["policy"] else {}) | given
    try:
        return SystemSpec.model_validate(raw)
    except ValidationError as problem:
        raise as_config_error(document, path, problem.errors()[0]) from None


def _policies(axis: str) -> dict[str, type[BaseModel]]:
    """The classes of an axis by the names of their policies."""

    def kinds(annotation: Any) -> Iterator[type[BaseModel]]:
        if isinstance(annotation, type):
            if issubclass(annotation, BaseModel):
                yield annotation
            return
        for part in get_args(annotation):
            yield from kinds(part)

    return {str(kind.model_fields["policy"].default): kind for kind in kinds(SystemSpec.model_fields[axis].annotation)}


def _check_options(document: Document, path: KeyPath, axis: str, policy: object, given: dict[str, Any]) -> None:
    classes = _policies(axis)
    if policy not in classes:
        raise document.error((*path, "policy"), f"unknown {axis} policy {policy!r}; {nearest(policy, classes)}")
    for key in given:
        if key not in classes[policy].model_fields:
            hint = nearest(key, classes[policy].model_fields)
            raise document.error((*path, key), f"unknown option of {policy}; {hint}")
