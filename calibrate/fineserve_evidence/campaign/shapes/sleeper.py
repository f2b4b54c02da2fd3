"""A vLLM engine in a process of its own that sleeps and wakes: ``{"sleep": level}`` or ``{"wake": 0}``."""

from __future__ import annotations

import time
from typing import Any

from fineserve_calibrate.probes.engine_worker import Engine, main


class SleepingEngine(Engine):
    """An engine that is told to sleep."""

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Sleep at the level asked for, or wake. Return the seconds."""
        begun_s = time.monotonic()
        if "sleep" in asked:
            self._llm.sleep(asked["sleep"])
        else:
            self._llm.wake_up()
        return {"seconds": time.monotonic() - begun_s}


if __name__ == "__main__":
    main(SleepingEngine)
