"""How the engines of one GPU share its SMs: part of a system, and of a cluster where it says otherwise.

In a file it is one word, or a mapping of one key:

    sharing: exclusive            one engine a GPU; a second one is refused
    sharing: fluid                ideal processor sharing
    sharing: time_slice           contexts take turns, as without a daemon
    sharing: in_turn              a step of each, as engines of one process take them
    sharing: mps                  kernels side by side, each engine may take all SMs
    sharing: {mps: {MODEL: 50}}   as many percent of the SMs at most for the engines of a model, all for others
    sharing: {mps: by_rate}       the fewest SMs with which a model meets its rate, from 30 % on (MuxServe)
    sharing: {mig: 3g}            slices of this profile; each is a GPU of its own to placement and memory

What each costs is in ``fineserve_sim.latency.sharing``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator
from pydantic_core import PydanticCustomError

Mode = Literal["exclusive", "fluid", "time_slice", "in_turn", "mps", "mig"]
MODES = ("exclusive", "fluid", "time_slice", "in_turn", "mps", "mig")
Percent = Annotated[int, Field(strict=True, ge=1, le=100)]


class Sharing(BaseModel):
    """A way of sharing. Under MPS, ``percent`` caps the SMs by model id; under MIG, each slice has the ``profile``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode
    percent: dict[str, Percent] | Literal["by_rate"] | None = None
    profile: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_words(cls, value: Any) -> Any:
        if isinstance(value, Sharing) or (isinstance(value, dict) and "mode" in value):
            return value
        match value:
            case str() if value in MODES and value != "mig":
                return {"mode": value}
            case {"mig": str(profile)} if len(value) == 1:
                return {"mode": "mig", "profile": profile}
            case {"mps": percent} if len(value) == 1:
                return {"mode": "mps", "percent": percent}
        raise PydanticCustomError(
            "sharing",
            "must be exclusive, fluid, time_slice, in_turn, mps, {mps: {MODEL: percent}}, {mps: by_rate} or {mig: PROFILE}",
        )

    @model_serializer
    def words(self) -> Any:
        """The word or mapping of a file."""
        if self.mode == "mig":
            return {"mig": self.profile}
        return self.mode if self.percent is None else {self.mode: self.percent}

    def renamed(self, models: Mapping[str, str]) -> Sharing:
        """The same sharing for models with other ids, given as new id to old."""
        if not isinstance(self.percent, dict):
            return self
        percent = {new: self.percent[old] for new, old in models.items() if old in self.percent}
        return self.model_copy(update={"percent": percent})

    def __str__(self) -> str:
        return self.mode if self.profile is None else f"mig {self.profile}"
