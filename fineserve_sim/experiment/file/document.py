"""YAML as plain data that remembers where every value was written.

The dialect is the useful part of YAML 1.2. Plain words are read by its core schema: ``1e3`` and ``012`` are numbers; ``no``,
``1:30`` and dates are texts. A key given twice, an anchor or an alias is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fineserve_sim.experiment.file.errors import ConfigError

KeyPath = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """SafeLoader with the plain words of YAML 1.2 and without aliases, which a short file can nest to an endless one."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(
                problem="aliases (*name) are not supported; write the value out", problem_mark=mark
            )
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes the texts that ``_Loader`` would read as something else."""


def _integer(_: yaml.Loader, node: yaml.ScalarNode) -> int:
    base = {"0o": 8, "0x": 16}.get(node.value[:2], 10)
    return int(node.value.removeprefix("0o"), base)


_CORE_SCHEMA = (
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)
"""Type, how it is written, and with what that begins (YAML 1.2.2, section 10.3.2)."""

for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _name, _written, _first in _CORE_SCHEMA:
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_written})\Z"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


@dataclass(slots=True)
class Document:
    """A mapping and the place of each of its values; a value without a place of its own has its parent's."""

    data: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """Where the value at ``path``, or the nearest thing around it, was written: ``file:line`` or an option."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return ""

    def error(self, path: KeyPath, problem: str) -> ConfigError:
        return ConfigError(self.place(path), dotted(path), problem)

    def set(self, key: str, value: Any, place: str) -> None:
        """Give the dotted ``key`` (list items by their index) a value, as if ``place`` had written it.

        Mappings on the way are made; whether they may exist is for the schema to say. Raises ConfigError when the key
        leads through a plain value or to a list item that does not exist.
        """
        path = key.split(".")
        holder: Any = self.data
        walked: list[str | int] = []
        for part in path[:-1]:
            walked.append(_step(holder, part, key, place))
            if isinstance(holder, dict):
                holder.setdefault(part, {})
            holder = holder[walked[-1]]
        last = _step(holder, path[-1], key, place)
        holder[last] = value
        full = (*walked, last)
        self.places = {at: where for at, where in self.places.items() if at[: len(full)] != full}
        self.places[full] = place


def _step(holder: Any, part: str, key: str, place: str) -> str | int:
    if isinstance(holder, dict):
        return part
    if not isinstance(holder, list):
        raise ConfigError(place, key, f'"{part}" cannot be set: what is before it is a value, not a mapping or a list')
    if not part.isdecimal() or int(part) >= len(holder):
        raise ConfigError(place, key, f'"{part}" is no item of the list; expected 0 to {len(holder) - 1}')
    return int(part)


def dotted(path: KeyPath) -> str:
    """``("models", 0, "tp")`` as ``models.0.tp``."""
    return ".".join(str(part) for part in path)


def read_yaml(path: Path) -> Document:
    """The mapping in a YAML file. Raises ConfigError for a file that cannot be read or is no such mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(str(path), "", "not a text file in UTF-8; expected an experiment in YAML") from None
    except OSError as problem:
        raise ConfigError(str(path), "", f"cannot be read: {problem.strerror}") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Document:
    """As ``read_yaml``, from text; ``name`` stands for the file in places."""
    try:
        loader = _Loader(text)
        try:
            return _Reader(loader, name).document()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark else 1
        raise ConfigError(f"{name}:{line}", "", f"not valid YAML: {problem.problem}") from None
    except (yaml.YAMLError, RecursionError) as problem:
        raise ConfigError(name, "", f"not valid YAML: {problem}") from None


def parse_value(text: str, place: str) -> Any:
    """One YAML value, as ``--set`` takes it. Raises ConfigError when it is none."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError):
        raise ConfigError(place, "", f"{text!r} is not a YAML value") from None


def to_yaml(data: dict[str, Any]) -> str:
    """A mapping as YAML that ``parse_yaml`` reads back the same."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Reader:
    """Turns one node tree into plain data and places."""

    def __init__(self, loader: _Loader, name: str) -> None:
        self._loader = loader
        self._name = name
        self._places: dict[KeyPath, str] = {}

    def document(self) -> Document:
        node = self._loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(self._name, "", "expected a mapping of keys and values, such as `fineserve: 1`")
        self._places[()] = self._name
        return Document(self._mapping(node, ()), self._places)

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        if path:
            self._places.setdefault(path, self._place(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        try:
            return self._loader.construct_object(node)
        except ValueError as problem:
            raise ConfigError(self._place(node), dotted(path), f"{node.value!r} is no value: {problem}") from None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(self._place(key_node), dotted(path), "a key must be a plain word")
            key = str(key_node.value)
            if key in found:
                first = self._places[(*path, key)]
                raise ConfigError(self._place(key_node), dotted((*path, key)), f"given twice; first at {first}")
            self._places[(*path, key)] = self._place(key_node)
            found[key] = self._value(value_node, (*path, key))
        return found

    def _place(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}"
