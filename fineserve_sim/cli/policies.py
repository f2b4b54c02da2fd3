"""The policies of every axis of a system, read off the classes that describe them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fineserve_sim.systems import SystemSpec


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a policy: what it takes, in words, and its default (None: it must be given)."""

    name: str
    choices: str
    default: Any


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy of one axis with its documentation."""

    axis: str
    name: str
    doc: str
    options: tuple[Option, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self)


def policies() -> list[Policy]:
    """Every policy, axis by axis, in the order of ``SystemSpec``."""
    return [_policy(axis, kind) for axis, kinds in _axes().items() for kind in kinds]


def chosen(system: SystemSpec) -> list[tuple[Policy, dict[str, Any]]]:
    """The policy of a system on each axis and the values of its options."""
    found = []
    for axis in _axes():
        spec = getattr(system, axis)
        if spec is not None:
            found.append((_policy(axis, type(spec)), spec.model_dump(mode="json", exclude={"policy"})))
    return found


def _axes() -> dict[str, list[type[BaseModel]]]:
    kinds = {axis: list(_policy_classes(field.annotation)) for axis, field in SystemSpec.model_fields.items()}
    return {axis: found for axis, found in kinds.items() if found}


def _policy_classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """The classes with a ``policy`` field in a possibly nested union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if "policy" in annotation.model_fields:
            yield annotation
        return
    for part in get_args(annotation):
        yield from _policy_classes(part)


def _policy(axis: str, kind: type[BaseModel]) -> Policy:
    options = tuple(
        Option(name, _choices(field), None if field.is_required() else field.get_default(call_default_factory=True))
        for name, field in kind.model_fields.items()
        if name != "policy"
    )
    return Policy(axis, str(kind.model_fields["policy"].default), inspect.cleandoc(kind.__doc__ or ""), options)


def _choices(field: FieldInfo) -> str:
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return " | ".join(map(str, get_args(annotation)))
    return annotation.__name__ if get_origin(annotation) is None and isinstance(annotation, type) else str(annotation)
