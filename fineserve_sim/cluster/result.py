"""What became of the requests of a trace that is all there, as columns in its order."""

from __future__ import annotations

from typing import Any

import numpy as np

from fineserve_sim.cluster.scenario import Ended


class WholeTrace:
    """Takes ended requests in any order. Columns as in ``RunResult``; those that never end stay unfinished, without moments."""

    def __init__(self, requests: int) -> None:
        self.first_token_s = np.full(requests, np.nan)
        self.finish_s = np.full(requests, np.nan)
        self.fate = np.zeros(requests, dtype=np.int8)
        self.preemptions = np.zeros(requests, dtype=np.int64)
        self.engine = np.full(requests, -1, dtype=np.int32)
        self.output_tokens = np.zeros(requests, dtype=np.int64)

    def __call__(self, ended: Ended) -> None:
        for name, column in self.columns().items():
            column[ended.request] = getattr(ended, name)

    def columns(self) -> dict[str, Any]:
        """By the names of ``RunResult``."""
        return dict(vars(self))
