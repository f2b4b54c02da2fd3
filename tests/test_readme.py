"""README.md: its example prints the numbers that the text gives."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fineserve_sim.experiment import load_experiment, run_loaded

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_example_has_the_numbers_that_the_text_gives(tmp_path: Path) -> None:
    (body,) = re.findall(r"^```yaml\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    file = tmp_path / "two_models.yaml"
    file.write_text(body, encoding="utf-8")
    summary = json.loads(run_loaded(load_experiment(file), tmp_path / "out", jobs=1).read_text(encoding="utf-8"))
    reached = {
        (cell["axes"]["rate_scale"], cell["system"]): cell["metrics"]["ttft_attainment"] for cell in summary["cells"]
    }
    said = re.search(r"hold the limit up to\s+rate scale 1; at 1\.5 (.*?)\. A wrong key", README, re.DOTALL)
    assert said is not None
    names = {"FineServe": "fineserve", "Prism*": "prism*", "Static*": "static*"}
    told = re.findall(r"([A-Z][a-zA-Z]+\\?\*?) (?:keeps )?(\d+) ± (\d+) %", said[1])
    assert len(told) == 3
    for name, percent, half_width in told:
        found = reached[1.5, names[name.replace("\\", "")]]
        assert (f"{100 * found['mean']:.0f}", f"{100 * found['half_width']:.0f}") == (percent, half_width)
    assert all(found["mean"] > 0.999 for (rate_scale, _), found in reached.items() if rate_scale <= 1)
