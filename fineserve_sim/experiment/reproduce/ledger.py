"""The ledger: each paper's claims, as numbers to compare ours with.

``targets.yaml`` is the project's own; another ledger (``--claims-file``) has a list ``claims`` of entries with id, paper,
where, kind, backend, value, target and unit. Its numbers replace ours for the ids that we know, in the order in which they
are written; the ids that we do not know stay without a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml

from fineserve_sim.experiment.file.schema import COMPARISON
from fineserve_sim.packaged import read_yaml

Expected: TypeAlias = "float | tuple[float, float] | str"
"""A number, both ends of a range, a comparison such as ``> 5``, or ``holds`` (a law, an order)."""

HOLDS = "holds"
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


class LedgerError(ValueError):
    """A ledger that cannot be read, or a claim that is not in it; one line."""


@dataclass(frozen=True, slots=True)
class Target:
    """One claim: where the paper makes it, which backend decides it, and what is expected of our numbers.

    ``expect`` has one entry a number, in ``unit``, after ours were multiplied with ``scale``. ``tolerance`` is relative.
    ``neutral`` is the number that means no effect, for all entries or one each. An ``input`` or a load ``calibration``
    (role) is evidence of nothing. ``undecidable``: why nothing here can decide the claim.
    """

    id: str
    paper: str
    where: str
    what: str
    kind: str
    backend: str
    expect: tuple[Expected, ...]
    unit: str = ""
    tolerance: float = 0.2
    scale: float = 1.0
    neutral: float | tuple[float, ...] | None = None
    role: Literal["claim", "input", "calibration"] = "claim"
    undecidable: str = ""
    known: bool = True

    def neutral_of(self, part: int) -> float | None:
        """The number that means no effect, for one entry of ``expect``."""
        return self.neutral[part] if isinstance(self.neutral, tuple) else self.neutral


@cache
def targets() -> Mapping[str, Target]:
    """Every claim of the project's own ledger, by id, in the order of the papers."""
    ledger = read_yaml(files("fineserve_sim.experiment.reproduce").joinpath("targets.yaml"))
    return {name: _target(name, paper, entry) for paper, entries in ledger.items() for name, entry in entries.items()}


@cache
def denominator() -> frozenset[str]:
    """Ids of the claims that the share of reproduced ones is of: a fixed list, so that no verdict leaves it."""
    listed = read_yaml(files("fineserve_sim.experiment.reproduce").joinpath("denominator.yaml"))
    return frozenset(name for names in listed.values() for name in names)


def _target(name: str, paper: str, entry: Mapping[str, Any]) -> Target:
    neutral = entry.get("neutral", 1.0 if entry["kind"] == "ratio" else None)
    neutral = tuple(neutral) if isinstance(neutral, list) else neutral
    expect = tuple(_expected(value) for value in entry["expect"])
    return Target(**{"id": name, "paper": paper} | dict(entry) | {"expect": expect, "neutral": neutral})


def _expected(value: Any) -> Expected:
    if isinstance(value, list):
        low, high = value
        return float(low), float(high)
    if isinstance(value, str):
        assert value == HOLDS or COMPARISON.fullmatch(value)
        return value
    return float(value)


def read_ledger(path: Path) -> dict[str, Target]:
    """The claims of another ledger, in its order. Raises LedgerError for a file that is none."""
    try:
        claims = yaml.safe_load(path.read_text(encoding="utf-8"))["claims"]
        return {str(claim["id"]): _foreign(claim) for claim in claims}
    except OSError as error:
        raise LedgerError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        problem = " ".join(str(error).split())
        raise LedgerError(f"{path}: not a ledger of claims with id, paper, where, kind, backend ({problem})") from None


def _foreign(claim: Mapping[str, Any]) -> Target:
    name = str(claim["id"])
    if name in targets():
        own = targets()[name]
        return replace(own, expect=_with_numbers(own.expect, list(_numbers(claim.get("target")))))
    paper, where, kind, backend = (str(claim[key]) for key in ("paper", "where", "kind", "backend"))
    what, unit = str(claim.get("metric") or ""), str(claim.get("unit") or "")
    return Target(name, paper, where, what, kind, backend, expect=(), unit=unit, known=False)


def _numbers(value: Any) -> Iterator[float]:
    """Every number in a value of the ledger, in the order in which it is written; text gives its first."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, str) and (found := _NUMBER.search(value)):
        yield float(found[0])
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def _with_numbers(expect: Sequence[Expected], numbers: Sequence[float]) -> tuple[Expected, ...]:
    """``expect`` with other numbers; unchanged when there are not as many."""
    if len(numbers) != sum(len(list(_numbers(_plain(value)))) for value in expect):
        return tuple(expect)
    rest = iter(numbers)
    return tuple(_renumbered(value, rest) for value in expect)


def _plain(value: Expected) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _renumbered(value: Expected, numbers: Iterator[float]) -> Expected:
    if isinstance(value, tuple):
        return next(numbers), next(numbers)
    if isinstance(value, str):
        found = COMPARISON.fullmatch(value)
        return f"{found[1]} {next(numbers):g}" if found else value
    return next(numbers)


def chosen(ledger: Mapping[str, Target], paper: str | None, ids: Sequence[str]) -> list[Target]:
    """The claims of one paper (part of its name, any case) and with these ids; all of them when neither is given.

    Raises LedgerError for a paper or an id that the ledger does not have.
    """
    found = list(ledger.values())
    if paper is not None:
        papers = dict.fromkeys(target.paper for target in found)
        found = [target for target in found if paper.lower() in target.paper.lower()]
        if not found or not paper.strip():
            raise LedgerError(f"--paper {paper}: no such paper; choose from {', '.join(papers)}")
    if missing := [name for name in ids if name not in {target.id for target in found}]:
        raise LedgerError(f"--claims {missing[0]}: no such claim; the ledger has {', '.join(t.id for t in found)}")
    return [target for target in found if not ids or target.id in ids]
