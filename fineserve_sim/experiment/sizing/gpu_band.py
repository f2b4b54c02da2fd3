"""The band of a number of GPUs: how many would do with steps as fast, and as slow, as the model may be off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fineserve_sim.catalog.model_errors import ErrorClass


@dataclass(frozen=True, slots=True)
class GpuBand:
    """The fewest GPUs with steps as fast, and as slow, as the band of ``error`` says; ``most`` is None where none up to
    ``tried`` do."""

    error: ErrorClass
    fewest: int
    most: int | None
    tried: int

    def __str__(self) -> str:
        if self.most is None:
            return f"{self.fewest} to over {self.tried}"
        return f"{self.fewest} to {self.most}" if self.fewest < self.most else str(self.most)

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        error = self.error.of._asdict() | self.error.model_dump(exclude={"of"})
        return {"fewest": self.fewest, "most": self.most, "tried": self.tried, "error": error, "text": str(self)}
