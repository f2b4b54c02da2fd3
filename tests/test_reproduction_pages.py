"""The pages of the papers against the ledger that `reproduce` writes: the same verdicts, the same count."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fineserve_sim.experiment.reproduce.readings import DEFAULT, read
from fineserve_sim.systems import open_readings

DOCS = Path(__file__).parents[1] / "docs"
LEDGER = (DOCS / "reproduction.md").read_text(encoding="utf-8")
PAGES = sorted((DOCS / "reproduction").glob("*.md"))
FIXED_LIST = DOCS.parent / "fineserve_sim" / "experiment" / "reproduce" / "denominator.yaml"
VERDICTS = {"reproduced", "direction only", "not reproduced", "not decidable here", "input"}


def verdicts(text: str) -> Iterator[tuple[str, str]]:
    """Claims with their verdicts, a row of a table each; parts of a claim, such as FS-10c/prism*, are left out."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        claim = re.match(r"(?:FS|PR|KS|VT)-[\w.-]+(?![\w.*/-])", cells[0])
        found = VERDICTS.intersection(cells[1:])
        if line.startswith("|") and claim and found:
            yield claim[0], found.pop()


SPARES = ("instances", "start_s", "growing_samples")
"""Options of a system that no claim is about."""
KNOWN = dict(verdicts(LEDGER))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_have_the_verdicts_of_the_ledger(page: Path) -> None:
    found = dict(verdicts(page.read_text(encoding="utf-8")))
    assert found, "no claim on the page"
    assert found == {claim: KNOWN.get(claim) for claim in found}


def test_the_count_is_that_of_the_ledger_and_the_last_of_the_table() -> None:
    counted = re.search(r"(\d+) of the (\d+) in the fixed list reproduced", LEDGER)
    assert counted
    share = round(100 * int(counted[1]) / int(counted[2]))
    assert f"So {counted[1]} of {counted[2]} come out ({share} %)" in LEDGER
    counts = re.findall(r"^\| .* \| (\d+) \|$", LEDGER.partition("### Loads that a rule sets")[0], flags=re.MULTILINE)
    assert counts[-1] == counted[1]


def test_every_claim_of_the_fixed_list_that_stays_out_has_a_cause() -> None:
    listed = yaml.safe_load(FIXED_LIST.read_text(encoding="utf-8"))
    outside = {claim for claims in listed.values() for claim in claims if KNOWN.get(claim) != "reproduced"}
    rows = LEDGER.partition("### What stays out, and why")[2].partition("\n### ")[0].splitlines()
    explained = {
        claim
        for row in rows
        if row.startswith("|")
        for claim in re.findall(r"(?:FS|PR|KS|VT)-[\w.-]+", row.split("|")[1])
    }
    assert explained == outside
    assert all(cell.strip() for row in rows if row.startswith("|") for cell in row.strip("|").split("|"))


def test_every_open_reading_was_run_and_the_claims_that_others_bring_out_are_named() -> None:
    found = read(DOCS / "data" / "readings.csv")
    alternatives = {(each.option, str(value)) for each in open_readings() for value in each.values[1:]}
    untouched = {option for option, _ in alternatives - set(found)}
    assert set(found) - alternatives == {DEFAULT}
    assert untouched == {"memory.contiguous.max_tokens", *(f"scaling.spares.{name}" for name in SPARES)}
    assert f"All {len(found) - 1} readings that touch a claim were compared" in LEDGER
    listed = yaml.safe_load(FIXED_LIST.read_text(encoding="utf-8"))
    outside = {claim for claims in listed.values() for claim in claims if KNOWN.get(claim) != "reproduced"}
    short = found.pop(DEFAULT)
    outside = {claim for claim in outside if short[claim] != "reproduced"}
    brought = sorted(claim for claim in outside if any(each.get(claim) == "reproduced" for each in found.values()))
    assert f"Other readings bring out two: {' and '.join(brought)}." in LEDGER
