"""The types that policies and drivers share: requests, the visible state of an engine, and the policy protocols.

Units: seconds are floats, tokens and bytes are ints; names carry the unit last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeGuard


class Request(NamedTuple):
    """A scheduler's view of a request. The output length is not part of it."""

    id: int
    model: str
    arrival_s: float
    prompt_tokens: int


class EngineState(NamedTuple):
    """A local scheduler's view of one engine at one moment.

    * ``running``: sequences that hold a slot, decoding or in prefill.
    * ``decoding``: sequences past their prefill.
    * ``prefill_tokens``: prompt tokens that are admitted and not yet computed.
    * ``free_kv_tokens``: tokens that the engine's KV memory could still take.
    * ``slowdown``: the present contention factor of its GPU, at least 1.
    """

    running: int
    decoding: int
    prefill_tokens: int
    free_slots: int
    free_kv_tokens: int
    slowdown: float


class EngineLoad(NamedTuple):
    """A dispatcher's or global memory manager's view of one engine at one moment. Blocks are KV blocks of the whole model.

    * ``queued_blocks``: blocks for the prompts of all its waiting requests; ``head_blocks``: blocks for the first one.
    * ``running``: requests that have a slot; ``stalled``: the running requests that wait for KV on its way.
    * ``fullest_bytes``: the most KV bytes on one of its instances, less the bytes kept for sequences to come.
    * ``shortest``: the running request with the fewest blocks, where asked for and if any may be moved.
    """

    used_blocks: int
    capacity_blocks: int
    queued_blocks: int = 0
    head_blocks: int = 0
    running: int = 0
    stalled: int = 0
    fullest_bytes: int = 0
    shortest: int | None = None
    shortest_blocks: int = 0

    @property
    def free_blocks(self) -> int:
        return self.capacity_blocks - self.used_blocks


PrefillLatency = Callable[[int, int, int], float]
"""Predicted seconds to prefill prompts in chunks, without contention.

The arguments are the tokens of the prompts, the decodes that run beside them, and the query-key pairs of the prompts. It never
falls with more prompts or longer ones. It is infinite when the decodes leave no token of a step to a prompt.
"""


def prompt_pairs(tokens: int) -> int:
    """Query-key pairs of one prompt: each token attends to itself and to all before it."""
    return tokens * (tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The constant facts about an engine.

    ``prefill_tokens_per_s`` is measured alone. ``slo_s`` is the TTFT SLO of its model. ``kv_capacity_tokens`` are the tokens
    that the engine could hold if no other engine held any.
    """

    prefill_tokens_per_s: float
    slo_s: float
    kv_capacity_tokens: int
    block_tokens: int = 16


@dataclass(slots=True)
class Admission:
    """A local scheduler's answer: start ``admitted`` in this order, refuse ``dropped`` for good."""

    admitted: list[Request] = field(default_factory=list)
    dropped: list[Request] = field(default_factory=list)


class LocalScheduler(Protocol):
    """Decides which waiting request starts next on the engines of its scope (one engine, or all engines of a GPU).

    ``add`` binds a request to an engine of the scope. The request waits until it is admitted, dropped or removed. Invariant:
    ``schedule`` is idempotent; called again with the same time and states, it admits and drops nothing more.
    """

    def add(self, request: Request, engine: int) -> None: ...

    def remove(self, request_id: int) -> bool:
        """Forget a waiting request (its client left). False when it is not waiting here."""

    def __len__(self) -> int: ...

    def schedule(self, now: float, engines: Mapping[int, EngineState]) -> Admission: ...

    def unchanged_until(self, now: float, engines: Mapping[int, EngineState]) -> float:
        """A time before which ``schedule`` would answer nothing.

        It assumes that no request comes or goes, no engine changes its batch and free memory does not grow. It may be early
        but is never late, and infinite when only such events matter. It is called just after ``schedule``.
        """


class KVLedger(NamedTuple):
    """Bytes of one KV memory. ``used + stranded + free + lost == total`` at every moment.

    ``stranded``: free entries of partly used slabs, which only blocks of the same size can take; ``lost``: bytes that no
    block can ever take (reserved slabs, grid remainders).
    """

    total_bytes: int
    used_bytes: int
    stranded_bytes: int
    free_bytes: int
    lost_bytes: int


class KVManager(Protocol):
    """KV memory of one GPU whose blocks have names.

    Names matter because the block that one engine gets decides which blocks its neighbours can still get. An ``owner`` is an
    engine that is registered with it. ``check`` raises AssertionError if the state contradicts itself.
    """

    def ledger(self) -> KVLedger: ...

    def check(self) -> None: ...

    def free_blocks(self, owner: int) -> int:
        """How many blocks ``owner`` could get now."""

    def capacity_blocks(self, owner: int) -> int:
        """How many blocks ``owner`` could get if every other owner held none."""

    def used_bytes(self, owner: int) -> int: ...

    def fits(self, demands: Mapping[int, int]) -> bool:
        """Whether all these blocks (owner to number) would be granted, in any order of asking.

        Owners that are not registered here are ignored.
        """

    def alloc(self, owner: int, blocks: int) -> list[int] | None:
        """``blocks`` block ids, or None when they do not all fit; then nothing is taken."""

    def free(self, owner: int, block_ids: Sequence[int]) -> None:
        """Give back blocks. Raises ValueError for an id that ``owner`` does not hold; then nothing is given back."""


class TimedKVManager(KVManager, Protocol):
    """A KV memory whose blocks may take host time, as driver calls do.

    ``fits`` then says whether the blocks would be granted without any.
    """

    def advance(self, now: float) -> None:
        """Set the time, which never goes back. It comes before everything else at that time."""

    def exposed_s(self, owner: int) -> float:
        """Seconds from now until the blocks that ``owner`` holds can be used: its next step starts that much later."""


class PrefixKVManager(KVManager, Protocol):
    """A KV memory that keeps full blocks of ended sequences for others with the same prefix (see memory/prefix.py)."""

    def match(self, owner: int, keys: Sequence[int]) -> list[int]:
        """The blocks of the longest recorded prefix of ``keys``, held by one sequence more; free them like others."""

    def record(self, owner: int, keys: Sequence[int], block_ids: Sequence[int]) -> None:
        """Keep the first ``len(keys)`` blocks of a sequence, all full; to be called before it frees them."""


def takes_time(memory: object) -> TypeGuard[TimedKVManager]:
    return hasattr(memory, "exposed_s")


def keeps_prefixes(memory: object) -> TypeGuard[PrefixKVManager]:
    return hasattr(memory, "record")


class OperatingPoint(NamedTuple):
    """One profiled batch size of a model on its GPUs: requests per second, TTFT, mean activation and KV bytes per GPU."""

    batch: int
    throughput_per_s: float
    ttft_s: float
    activation_bytes: int
    kv_bytes: int


class Busy(NamedTuple):
    """The parts of the time alone in which compute units and memory bandwidth are busy, in [0, 1]."""

    compute: float
    bandwidth: float


ALWAYS = Busy(1.0, 1.0)
"""Where nothing was measured."""

TYPICAL_VARIANCE = 0.5
"""The variance of a rate, over its mean squared, where its past is not known."""


class KindFacts(NamedTuple):
    """The measured facts of a model on one kind of GPU. ``mme_tokens_per_byte`` None: left open."""

    profile: tuple[OperatingPoint, ...]
    mme_tokens_per_byte: float | None
    prefill: Busy = ALWAYS
    decode: Busy = ALWAYS


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """The facts of a model for global placement: its load, its SLO and its profile. Bytes are per GPU of its TP group.

    * ``by_kind``: the facts on each kind of GPU (``GpuSlot.kind``), where there are several. The facts of kind 0 stand in the
      fields of the demand as well.
    * ``slo_s``: the TTFT SLO; ``tpot_slo_s``: the SLO of the time per token, if any.
    * ``tokens_per_request``: the expected prompt and output together.
    * ``weight_bytes``: weights and context; ``activation_bytes``: the peak of a full step.
    * ``decode_tokens``: tokens after a prompt, on average; ``prefill``, ``decode``: how busy the two keep a GPU.
    * ``rate_variance``: of its rate, over its mean squared (``TYPICAL_VARIANCE`` where it was not measured).
    """

    id: str
    rate_per_s: float
    slo_s: float
    tp: int
    weight_bytes: int
    token_bytes: int
    profile: tuple[OperatingPoint, ...] = ()
    mme_tokens_per_byte: float | None = None
    tokens_per_request: float = 0.0
    tpot_slo_s: float | None = None
    activation_bytes: int = 0
    by_kind: tuple[KindFacts, ...] = ()
    decode_tokens: float = 0.0
    prefill: Busy = ALWAYS
    decode: Busy = ALWAYS
    rate_variance: float = TYPICAL_VARIANCE

    @property
    def engine_bytes(self) -> int:
        """All bytes that an engine takes beside KV."""
        return self.weight_bytes + self.activation_bytes

    @property
    def most_per_s(self) -> float:
        """The most requests per second of its profile; 0 without one."""
        return max((point.throughput_per_s for point in self.profile), default=0.0)

    def on(self, kind: int) -> ModelDemand:
        """The model as it is on GPUs of this kind."""
        return replace(self, **self.by_kind[kind]._asdict(), by_kind=()) if self.by_kind else self


@dataclass(frozen=True, slots=True)
class GpuSlot:
    """One GPU as placement sees it: ``memory_bytes`` is the usable budget for weights, activations and KV.

    GPUs of one ``node`` may form TP groups; they are all of one ``kind``. A model's demand tells its performance on GPUs of a
    kind (``ModelDemand.on``).
    """

    id: int
    node: int
    memory_bytes: int
    kind: int = 0


@dataclass(frozen=True, slots=True)
class Instance:
    """One replica of a model on a TP group. ``footprint_bytes`` (per GPU) is the fixed charge F_M where the policy has one."""

    model: str
    replica: int
    gpus: tuple[int, ...]
    rate_per_s: float
    footprint_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Instances in the order in which they were decided.

    ``unplaced`` models fit nowhere. ``infeasible`` models have a place, but no profiled operating point meets their SLO.
    """

    instances: tuple[Instance, ...]
    unplaced: tuple[str, ...] = ()
    infeasible: tuple[str, ...] = ()


class PlacementPolicy(Protocol):
    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement: ...
