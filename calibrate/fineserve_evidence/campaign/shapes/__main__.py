"""``python3 -m fineserve_evidence.campaign.shapes TRIAL MODEL cuda|cpu``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping

from fineserve_calibrate.probes.engines import LLAMA_8B, TINY, ProbedModel

from fineserve_evidence.campaign.shapes import asleep, graphs, groups, handles

TRIALS: Mapping[str, Callable[[ProbedModel, str], dict[str, float]]] = {
    "ipc": lambda model, device: handles.ipc(),
    "handles": lambda model, device: handles.pages(),
    "nccl": lambda model, device: groups.nccl(),
    "gloo": lambda model, device: groups.made("gloo", 2),
    "graphs": graphs.both_shapes,
    "asleep": lambda model, device: asleep.residue(model),
}


def main() -> None:
    """Run one trial and print its numbers."""
    trial, name, device = sys.argv[1:]
    model = next(known for known in (TINY, LLAMA_8B) if known.name == name)
    print(json.dumps(TRIALS[trial](model, device)))


if __name__ == "__main__":
    main()
