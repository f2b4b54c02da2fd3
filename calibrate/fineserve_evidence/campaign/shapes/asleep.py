"""What an engine keeps on the GPU when its weights and its KV are gone: context, graphs, workspaces.

The engine is vLLM's own with its own sleep. An engine of the runtime that sleeps keeps a context and workspaces, too, for its
weights and KV lie in the region. It has no graphs where weights lie there.
"""

from __future__ import annotations

import sys
from typing import Any

from fineserve_calibrate.probes.engines import ProbedModel
from fineserve_calibrate.probes.schema import Unavailable

from fineserve_evidence.campaign.crew import KEPT_LOG, Member, settings
from fineserve_evidence.campaign.items import Scene, Seat
from fineserve_evidence.campaign.plan import BF16, GPU
from fineserve_evidence.campaign.shapes.handles import has_context
from fineserve_evidence.campaign.shapes.second import used_bytes

SLEEP_LIMIT_S = 60.0


class Sleeper(Member):
    """An engine that can sleep."""

    worker = "fineserve_evidence.campaign.shapes.sleeper"

    def told(self, what: str, level: int = 0) -> float:
        """Let it sleep or wake, and return the seconds."""
        self.tell({what: level})
        return float(self.answer(SLEEP_LIMIT_S)["seconds"])


def sleeper_settings(model: ProbedModel) -> dict[str, Any]:
    """Make the settings of an engine of the pairs that may sleep."""
    scene = Scene("time_slice", model.name, GPU.mode, (Seat(BF16),), GPU.decodes)
    given = settings(scene, 0, model, on_cpu=False, mps=())
    given["arguments"]["enable_sleep_mode"] = True
    return given


def residue(model: ProbedModel) -> dict[str, float]:
    """Measure the engine's bytes awake and asleep at both levels, and the seconds of each change."""
    has_context()
    before = used_bytes()
    engine = Sleeper(sleeper_settings(model))
    try:
        engine.started()
        found = {"awake_bytes": float(used_bytes() - before)}
        for level in (1, 2):
            found[f"sleep_{level}_s"] = engine.told("sleep", level)
            found[f"asleep_{level}_bytes"] = float(used_bytes() - before)
            if level == 1:  # level 2 forgets the weights
                found["wake_1_s"] = engine.told("wake")
        return found
    except Unavailable:
        print(engine.log()[-KEPT_LOG:], file=sys.stderr)
        raise
    finally:
        engine.close()
