"""A plan in time against one plan and residencies that follow the load: ServeGen's clients of ``plan_matrix.yaml``, 8,000
requests at 30 a second on four H100, eight windows. Some minutes of one core.

    python -m benchmarks.plan_in_time --data ../shared/data            # renews docs/data/plan_in_time.csv
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from benchmarks.plan_matrix import wish_of
from fineserve_sim.planning.find import Budget
from fineserve_sim.planning.in_time import RIVALS, InTime, judged, planned
from fineserve_sim.planning.wish import Wish

SITUATION, REQUESTS, EVERY_S = "servegen-8-4", 8000, 34.0
EVALUATIONS = 225
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "data" / "plan_in_time.csv"


def drifting(data: Path, folder: Path) -> Wish:
    """The situation with more requests, each model in one precision: 32B in FP8, which leaves room beside it."""
    matrix = yaml.safe_load(Path(__file__).with_name("plan_matrix.yaml").read_text(encoding="utf-8"))
    situation = next(each for each in matrix["situations"] if each["name"] == SITUATION)
    wish = wish_of(situation | {"requests": REQUESTS}, data, folder)
    return replace(wish, models=tuple(replace(model, options=model.options[-1:]) for model in wish.models))


def rows(found: InTime) -> list[str]:
    """What came out, as CSV: percent of the requests on time, of rivals the half-width of the difference, of windows the
    engines that came and their GB."""
    lines = ["what,on_time,half_width,engines,gigabytes", f"plan in time,{100 * found.on_time:.1f},,,"]
    for name, (share, half_width) in zip(RIVALS, found.rivals, strict=True):
        lines.append(f'"{name}",{100 * share:.1f},{100 * half_width:.1f},,')
    windows = (f"from {each.from_s:.0f} s,,,{each.came},{each.moved_bytes / 1e9:.0f}" for each in found.windows)
    return [*lines, *windows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with traces/")
    parser.add_argument("--evaluations", type=int, default=EVALUATIONS, help="islands that are simulated in all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the results")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        wish = drifting(arguments.data, Path(folder))
        lines = rows(judged(planned(wish, EVERY_S, Budget(arguments.evaluations))))
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
