"""The parts of the pages that come from the code: ``python -m docs.generate`` writes them, a test holds them.

A page has them between ``<!-- generated: NAME -->`` and ``<!-- end -->``; the rest of a page is written by hand. What a block
holds is Markdown that a function of this package returns. Meanings of keys and options are in the YAML files beside it, numbers
that take minutes in ``docs/data`` (``python -m docs.generate --measure DIR`` makes these anew).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from docs.generate import assumptions, commands, contention, errors, hardware, schema, scorecard, steps, systems

DOCS = Path(__file__).parents[1]
README = DOCS.parent / "README.md"
BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

BLOCKS: Mapping[str, Callable[[], str]] = {
    "experiment-file": schema.experiment_file,
    "systems": systems.systems,
    "policies": systems.policies,
    "gpus": hardware.gpus,
    "models": hardware.models,
    "precisions": hardware.precisions,
    "deployments": hardware.deployments,
    "loaders": hardware.loaders,
    "commands-sim": commands.fineserve_sim,
    "commands-calibrate": commands.fineserve_calibrate,
    "commands-run": commands.fineserve_run,
    "latency-numbers": assumptions.latency_numbers,
    "engine-defaults": assumptions.engine_defaults,
    "sensitivity": assumptions.sensitivity,
    "step-parts": steps.parts_table,
    "errors-summary": errors.summary,
    "contention": contention.contention,
    "fig10-caption": contention.caption,
    "shares": errors.shares,
    "sharing": errors.sharing,
    "scorecard-coverage": scorecard.covered,
    "scorecard-sets": scorecard.every_set,
    "scorecard-refused": scorecard.refused,
    "sharing-summary": errors.sharing_summary,
}


def written(text: str) -> str:
    """A page with its blocks as the code has them now. Raises KeyError for a block that nobody makes."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found['name']]().strip()}\n\n{found[3]}", text)


def pages() -> list[Path]:
    """The pages that have blocks, README.md among them."""
    return [path for path in (README, *sorted(DOCS.rglob("*.md"))) if BLOCK.search(path.read_text(encoding="utf-8"))]


def write() -> list[Path]:
    """Renew all pages; those that changed."""
    changed = []
    for path in pages():
        before = path.read_text(encoding="utf-8")
        after = written(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path)
    return changed
