"""The ledger for readers: a table in the terminal, JSON, and the same table in Markdown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fineserve_sim.experiment.reproduce.judge import VERDICTS, Quantity
from fineserve_sim.experiment.reproduce.ledger import HOLDS, Expected, LedgerError, Target, denominator
from fineserve_sim.experiment.reproduce.readings import DEFAULT, Verdicts, moves, under
from fineserve_sim.experiment.reproduce.session import Row
from fineserve_sim.experiment.run.files import atomic
from fineserve_sim.experiment.show.labels import interval, number

STYLES = {"reproduced": "green", "direction only": "yellow", "not reproduced": "red"}
BEGIN, END = "<!-- begin of fineserve-sim reproduce -->", "<!-- end of fineserve-sim reproduce -->"
"""Between these lines of a Markdown file stands the ledger."""


def expected(target: Target) -> str:
    """The paper's side in one line; empty where the ledger has no number."""
    listed = "; ".join(_expected(value) for value in target.expect)
    return f"{listed} {target.unit}".strip() if target.expect != (HOLDS,) else HOLDS


def _expected(value: Expected) -> str:
    if isinstance(value, tuple):
        return f"{number(value[0])} to {number(value[1])}"
    return value if isinstance(value, str) else number(value)


def ours(row: Row) -> str:
    """Our side in one line, each number with its interval."""
    return "; ".join(_ours(quantity, row.target.scale) for quantity in row.quantities)


def _ours(quantity: Quantity, scale: float) -> str:
    value = quantity.value
    if isinstance(value, bool):
        text = HOLDS if value else "does not hold"
    elif isinstance(value, str):
        text = value
    elif math.isnan(value):
        text = "–"
    else:
        half_width = quantity.half_width * scale
        text = interval(value * scale, None if math.isnan(half_width) else half_width)
    return f"{quantity.label}: {text}" if quantity.label else text


def counted(rows: Sequence[Row]) -> str:
    """How many claims have which verdict; inputs and calibration apart."""
    counts = Counter(row.verdict for row in rows)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])


def share(rows: Sequence[Row]) -> tuple[int, int]:
    """Reproduced ones among the claims of the fixed list that are here, and how many of those are here."""
    listed = [row for row in rows if row.target.id in denominator()]
    return sum(row.verdict == "reproduced" for row in listed), len(listed)


def _summary(rows: Sequence[Row]) -> str:
    reproduced, listed = share(rows)
    ratio = f"; {reproduced} of the {listed} in the fixed list reproduced ({reproduced / listed:.0%})" if listed else ""
    return f"{len(rows)} claims: {counted(rows)}{ratio}"


def ledger(rows: Sequence[Row], verdicts: Verdicts | None = None) -> Group:
    """The terminal's view: a table a paper, then the inputs, then the counts. ``verdicts``: under other readings."""
    parts: list[RenderableType] = []
    for title, members in _sections(rows):
        parts += [Text(title, style="bold"), _table(members)]
    lines = [_summary(rows), *([_readings(rows, verdicts)] if verdicts else [])]
    return Group(*parts, *(Text(line, style="bold") for line in lines))


def _readings(rows: Sequence[Row], verdicts: Verdicts) -> str:
    """How many claims of the fixed list are reproduced under which readings."""
    counts = Counter(under(row, verdicts) for row in rows if row.target.id in denominator())
    return (
        ", ".join(f"{counts[which]} reproduced under {which}" for which in ("every", "some", "none"))
        + " of the readings"
    )


def _sections(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    claims = [row for row in rows if row.target.role == "claim"]
    for paper in dict.fromkeys(row.target.paper for row in claims):
        yield paper, [row for row in claims if row.target.paper == paper]
    if inputs := [row for row in rows if row.target.role != "claim"]:
        yield "Inputs and load calibration, not evidence", inputs


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for header in ("Claim", "What", "Paper", "Ours", "Verdict", "Why"):
        table.add_column(header, no_wrap=header == "Claim", overflow="fold")
    for row in rows:
        target = row.target
        verdict = Text(row.verdict, style=STYLES.get(row.verdict, "dim"))
        table.add_row(target.id, target.what, expected(target), ours(row), verdict, row.reason)
    return table


def as_json(rows: Sequence[Row], verdicts: Verdicts | None = None) -> dict[str, Any]:
    """The ledger as data: counts, and an entry a claim, with the readings under which it is reproduced where they were run."""
    claims = [row for row in rows if row.target.role == "claim"]
    return {
        "counts": {
            verdict: sum(row.verdict == verdict for row in claims) for verdict in VERDICTS if verdict != "input"
        },
        "fixed_list": dict(zip(("reproduced", "claims"), share(rows), strict=True)),
        "inputs": sum(row.target.role != "claim" for row in rows),
        "claims": [{**_entry(row), **({"under": under(row, verdicts)} if verdicts else {})} for row in rows],
    }


def _entry(row: Row) -> Mapping[str, Any]:
    target = row.target
    return {
        "id": target.id,
        "paper": target.paper,
        "where": target.where,
        "what": target.what,
        "kind": target.kind,
        "backend": target.backend,
        "role": target.role,
        "expected": [list(value) if isinstance(value, tuple) else value for value in target.expect],
        "unit": target.unit,
        "ours": [_quantity(quantity, target.scale) for quantity in row.quantities],
        "verdict": row.verdict,
        "by": row.by,
        "reason": row.reason,
    }


def _quantity(quantity: Quantity, scale: float) -> Mapping[str, Any]:
    value = quantity.value
    plain = value if isinstance(value, str | bool) else _finite(value * scale)
    return {"label": quantity.label, "value": plain, "half_width": _finite(quantity.half_width * scale)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def check_markdown(path: Path) -> None:
    """Raises LedgerError for a file that ``write_markdown`` cannot write to."""
    _around(path)


def write_markdown(rows: Sequence[Row], path: Path, verdicts: Verdicts | None = None) -> None:
    """Put the ledger between the two lines of a Markdown file that are made for it. Raises LedgerError without them.
    ``verdicts``: under other readings, for a column of their own.

    Pages in a folder of the file's name (``reproduction/prism.md`` beside ``reproduction.md``) are linked from their papers.
    """
    head, tail = _around(path)
    pages = {page.stem: f"{path.stem}/{page.name}" for page in path.with_suffix("").glob("*.md")}
    with atomic(path) as temporary:
        temporary.write_text("\n".join([head, "", *_markdown(rows, pages, verdicts or {}), tail]), encoding="utf-8")


def _around(path: Path) -> tuple[str, str]:
    """What stands before the ledger and behind it, the marking lines included."""
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}\n{END}\n"
    except (OSError, UnicodeDecodeError) as problem:
        raise LedgerError(f"{path}: cannot be read: {problem}") from None
    if not path.parent.is_dir():
        raise LedgerError(f"{path}: there is no folder {path.parent}")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise LedgerError(f"{path}: expected the lines {BEGIN} and {END}, between which the ledger goes")
    return head + BEGIN, END + tail


def _markdown(rows: Sequence[Row], pages: Mapping[str, str], verdicts: Verdicts) -> Iterator[str]:
    yield f"{_summary(rows)}{f'; {_readings(rows, verdicts)}' if verdicts else ''}."
    for title, members in _sections(rows):
        yield f"\n### {title}\n"
        page = pages.get(title.partition("/")[0].lower())
        if page:
            yield f"Reasons and ablations: [{page}]({page}).\n"
        yield f"| claim | what | paper | ours | verdict | {'reproduced under | ' if verdicts else ''}by |"
        yield f"|---|---|---|---|---|---|{'---|' if verdicts else ''}"
        for row in members:
            target = row.target
            readings = (_told(row, verdicts),) if verdicts else ()
            cells = (target.id, target.what, expected(target), ours(row) or row.reason, row.verdict, *readings, row.by)
            yield "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"
    yield ""


def _told(row: Row, verdicts: Verdicts) -> str:
    """Under which readings a claim is reproduced; where some decide it, which ones change the verdict."""
    which = under(row, verdicts)
    deciding = ", ".join(f"`{reading}`" for reading in moves(row, verdicts))
    default = verdicts.get(DEFAULT, {}).get(row.target.id, row.verdict)
    return f"some ({'not ' if default == 'reproduced' else ''}{deciding})" if which == "some" else which
