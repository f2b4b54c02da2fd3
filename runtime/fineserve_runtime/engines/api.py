"""The contract between vLLM engines and their driver (the runtime, the replayer, tests, a fake).

An `EngineHost` owns one device: its KV region and the engines on it. Engines step by themselves whenever they have work.
After each step the host calls ``listener.on_step`` with everything that happened in it: new tokens, preemptions, the time
it took and the state that a local scheduler sees. That call *is* the boundary between two iterations, so this is where a
controller turns ``EngineStepped`` into ``submit`` calls. In mode ``in_process`` the next step waits for it; in mode
``processes`` the engine goes on meanwhile, and what is submitted joins the step after the one in flight.

An idle engine makes no steps, so a driver reads ``state()`` before it submits to one.

Threads: every method may be called from any thread, from inside a listener too. Listener calls come from threads of the
host, one at a time an engine, and must return quickly. Times are ``time.monotonic()`` seconds of the device's machine, which
all its processes share. Engine ids are the positions in ``HostConfig.engines``; request ids come from the policy core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from fineserve_sim.policy.groups.microbatch import LookaheadMode
from fineserve_sim.policy.interfaces import EngineState, KVLedger

Mode = Literal["in_process", "processes"]
Device = Literal["cpu", "cuda"]
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model made on the spot: Llama shape, random weights from ``seed``, a local tokenizer; nothing is downloaded."""

    seed: int = 0
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 512


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: a model in one precision. ``model`` is a folder in Hugging Face's format, or a tiny model.

    ``kv_cache_dtype`` and ``quantization`` take vLLM's words; unknown or unsafe ones are refused (formats.py).
    ``kv_limit_bytes`` bounds how much of the region the engine may lease for KV; None: all of it. Limits that sum up to the
    region make a static split.

    ``gpus`` of its host hold a rank of the engine each, in vLLM's order; by default the host's first GPU. They
    split each layer (tensor parallelism), or with ``stages`` the layers into so many consecutive parts (pipeline parallelism),
    each of which ``len(gpus) / stages`` of them split. ``embeds``: it answers prompts with vectors, not with text.
    ``swaps``: KV of preempted requests is kept in host memory.
    ``keeps``: the layers (from, to) that stay when it drops the others. ``borrows``: it has no weights of its own; engines of
    the same model lend it theirs, one on each of its devices. ``lookahead``: prompts are cut into microbatches
    by the core's former, not by token count.
    """

    name: str
    model: Path | TinyModel
    dtype: str = "bfloat16"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    block_tokens: int = 32
    max_model_len: int = 512
    max_sequences: int = 16
    max_batched_tokens: int = 512
    prefix_caching: bool = False
    kv_limit_bytes: int | None = None
    gpus: tuple[int, ...] = ()
    stages: int = 1
    embeds: bool = False
    swaps: bool = False
    keeps: tuple[int, int] | None = None
    borrows: bool = False
    lookahead: LookaheadMode | None = None


@dataclass(frozen=True, slots=True)
class Paging:
    """KV memory mapped page by page (pages.py): a page has ``slab_bytes`` in each tensor of an engine, K and V of each layer.
    A thread keeps ``ahead[0]`` of its pages mapped ahead of need, and emptied ones stay mapped up to ``ahead[1]``; with (0, 0)
    there is no thread. ``batched``: one call for a page that is in one piece."""

    slab_bytes: int
    ahead: tuple[int, int] = (0, 0)
    batched: bool = False


@dataclass(frozen=True, slots=True)
class HostConfig:
    """One device and its engines; or several ``gpus``, which engines with ranks tie together.

    Each has a region of its own in the shared files ``<region_dir>/fineserve-<region_name><gpu>.{kv,table}``: a second host on
    the same name is refused. ``region_bytes`` (of each) covers KV and, with ``weights_in_region``, weights (only then can
    engines sleep).
    ``slab_multiple`` is the paper's k: a slab is so many times the least common multiple of the block sizes. With ``paging``,
    slabs are the physical pages behind engines' own address spaces. ``contiguous``: every sequence gets room for
    ``max_model_len`` tokens in one piece. ``poison_freed``
    fills every slab that is given back with 0xFF (tests, debugging). A device on another machine that gives no sign of life
    for ``silent_s`` is ended, be it while its engines start.
    """

    engines: tuple[EngineConfig, ...]
    region_bytes: int
    mode: Mode = "in_process"
    device: Device = "cpu"
    region_name: str = "device"
    gpus: tuple[int, ...] = (0,)
    region_dir: Path = Path("/dev/shm")
    slab_multiple: int = 1
    paging: Paging | None = None
    contiguous: bool = False
    weights_in_region: bool = False
    poison_freed: bool = False
    silent_s: float = 60.0
    cache_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "fineserve")

    def gpus_of(self, engine: EngineConfig) -> tuple[int, ...]:
        """Where its ranks are. Raises ValueError for a device that is not this host's."""
        gpus = engine.gpus or self.gpus[:1]
        for gpu in gpus:
            if gpu not in self.gpus:
                raise ValueError(f"{engine.name}: device {gpu} is not among those of its host ({self.gpus})")
        return gpus


@dataclass(frozen=True, slots=True)
class Sampling:
    """vLLM's sampling parameters, under its names. ``temperature`` 0 is greedy. ``max_tokens`` bounds the output;
    ``ignore_eos`` makes it exact. ``logprobs``: log probabilities of each token and of so many likely ones beside it.
    ``prompt_logprobs``: the same of the prompt's tokens. ``constraint``: what kind of text is wanted (json, regex, choice,
    grammar, json_object) and its description, as JSON or text. ``cache_salt``: only requests with the same one share KV of
    equal prompts."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: tuple[str, str] | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """A request handed to an engine: it may be prefilled from the next step on. Lower ``priority`` goes first."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    priority: int = 0


class Lent(NamedTuple):
    """The weights that an engine lends after a drop: the first byte in its region of each tensor that it kept. It gave up the
    slabs from ``freed_from`` on, which KV takes last."""

    freed_from: int
    first_bytes: dict[str, int]


class KvPart(NamedTuple):
    """KV of a sequence of which ``tokens`` are computed: the bytes of each of its ``blocks`` from ``first_block`` on."""

    first_block: int
    tokens: int
    blocks: tuple[bytes, ...]


Logprobs = tuple[tuple[int, float], ...]
"""Log probabilities at one place of the output: the token that was taken, then the likeliest ones."""


class TokenChunk(NamedTuple):
    """The result of one step for a request. ``finish_reason`` is None while the request goes on. ``problem``: what is wrong
    with a request that ends with "error"; ``logprobs``: one entry a token, where they were asked for. The first token brings
    the prompt's, from its second token on. ``vector``: the whole answer of an engine that embeds."""

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    problem: str = ""
    logprobs: tuple[Logprobs, ...] = ()
    vector: tuple[float, ...] = ()


class StepReport(NamedTuple):
    """One step of one engine, sent at its end. A pipeline begins a step while the one before is under way.

    ``prefill_tokens`` and ``decodes`` are its composition, ``context_tokens`` the tokens in cache before it;
    ``schedule_s`` is the part of ``ended_s - started_s`` spent in the scheduler. ``preempted`` names requests that lost
    their blocks in it and will be recomputed.
    """

    engine: int
    started_s: float
    ended_s: float
    schedule_s: float
    prefill_tokens: int
    decodes: int
    context_tokens: int
    chunks: tuple[TokenChunk, ...]
    preempted: tuple[int, ...]
    state: EngineState


class EngineStats(NamedTuple):
    """The memory and counters of one rank, on its device.

    Bytes of the region: leased by the engine, in used blocks, stranded in its partly used slabs, of idle cached prefixes
    (evictable), and of weights. Counters are since the start. ``prefix_queries`` are prompt tokens that were looked up in the
    cache, ``prefix_hits`` those that were there. Where memory is mapped page by page: ``spare_bytes`` of pages that are mapped
    ahead and free, how many were mapped and unmapped, and the seconds that all of it took."""

    leased_bytes: int
    used_bytes: int
    stranded_bytes: int
    cached_bytes: int
    weight_bytes: int
    steps: int
    preemptions: int
    slabs_leased: int
    slabs_returned: int
    blocks_zeroed: int
    prefix_queries: int = 0
    prefix_hits: int = 0
    spare_bytes: int = 0
    pages_mapped: int = 0
    map_s: float = 0.0
    pages_unmapped: int = 0
    unmap_s: float = 0.0


class EngineListener(Protocol):
    """Hears of steps and deaths of engines. ``lost`` are the requests that the engine held and that no engine will finish;
    ``crashed``: an exception in a step ended it, which one of them may have caused."""

    def on_step(self, report: StepReport) -> None: ...

    def on_died(self, engine: int, reason: str, lost: tuple[int, ...], crashed: bool = False) -> None: ...


class EngineDied(RuntimeError):
    """The engine's process is gone; its slabs are back."""


class EngineHandle(Protocol):
    """One engine, as its driver sees it."""

    @property
    def id(self) -> int: ...

    @property
    def config(self) -> EngineConfig: ...

    @property
    def model_dir(self) -> Path:
        """Where config.json, weights and tokenizer lie (made on the spot for a tiny model)."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def gpus(self) -> tuple[int, ...]:
        """The devices of its ranks."""
        ...

    @property
    def block_bytes(self) -> int:
        """The bytes of a KV block, on each device of the engine."""
        ...

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that fit when no other engine holds KV (weights in the region stay where they are)."""
        ...

    @property
    def alive(self) -> bool: ...

    @property
    def asleep(self) -> bool: ...

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life, which comes at least every second while the engine is sound; 0 for one that is
        dead or starts."""
        ...

    def submit(self, submission: Submission) -> None:
        """Raises ValueError for an empty prompt or one that leaves no room under max_model_len, EngineDied when dead and
        RuntimeError while asleep."""
        ...

    def abort(self, request_id: int) -> None:
        """The client left: the request ends with finish_reason "abort" in a later report. Unknown ids are ignored."""
        ...

    def state(self) -> EngineState:
        """As of the last boundary, plus what was submitted since. ``free_kv_tokens`` counts evictable prefixes."""
        ...

    def stats(self, gpu: int | None = None) -> EngineStats:
        """The figures of the rank on ``gpu``, by default the first."""
        ...

    def copy_kv(self, request_id: int, first_block: int, *, stop: bool = False) -> KvPart | None:
        """The KV of a request that decodes, at the end of a step: its full blocks from ``first_block`` on. With ``stop`` the
        request leaves the engine, and its last block comes along, full or not. None, and nothing done, for one that does not
        decode. The listener has heard of all tokens that came before. Raises EngineDied and RuntimeError. Do not call it from
        a listener.
        """
        ...

    def hold_kv(self, request_id: int, part: KvPart, *, last: bool = False) -> bool:
        """Keep KV of a request that is to come here, and room for it. The request uses it when it is submitted. False, and
        nothing kept, when there is no room, or when the parts before it are gone with a former life of the engine. The ``last``
        part needs no room. Raises and is called as ``copy_kv``."""
        ...

    def forget_kv(self, request_id: int) -> None:
        """The request will not come. Does not wait."""
        ...

    def evacuate(self, *, with_kv: bool) -> list[tuple[int, KvPart | None]]:
        """All requests leave the engine at the end of a step: their ids, and the KV of each that decodes, where it is wanted.
        Raises and is called as ``copy_kv``."""
        ...

    def droppable_bytes(self) -> int:
        """The bytes of the slabs that ``drop_layers`` frees. Raises and is called as ``sleep``."""
        ...

    def drop_layers(self) -> Lent:
        """The engine, which has no requests, gives up the layers that it does not keep, and counts as asleep. ``wake`` brings
        them back. Raises and is called as ``sleep``."""
        ...

    def borrow(self, lent: Sequence[Lent]) -> None:
        """Tell an engine that borrows, before it wakes, which weights each of its devices lends. Raises and is called as
        ``sleep``."""
        ...

    def vacate(self, first_slab: int | None) -> None:
        """Hold no KV from this slab on, until this is called again; None: everywhere. Requests there go on elsewhere with
        their KV. Raises and is called as ``sleep``."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until no request is left and the listener has heard all; False when time ran out. Do not call it from a
        listener."""
        ...

    def sleep(self) -> float:
        """Weights to host memory, every slab back. Returns the seconds it took. Raises RuntimeError while requests are left.
        Do not call it from a listener."""
        ...

    def wake(self) -> float:
        """Weights back onto the device; the engine accepts requests again. Returns the seconds it took. Raises RuntimeError
        when the region has no room for them now. Do not call it from a listener."""
        ...


class EngineHost(Protocol):
    """One device, or several that engines tie together: ``start_host(config, listener)`` (host.py) builds it and returns when
    every engine is ready."""

    @property
    def config(self) -> HostConfig: ...

    @property
    def engines(self) -> Mapping[int, EngineHandle]: ...

    @property
    def sound(self) -> bool:
        """False when a thread of this process hangs that steps engines: only a restart of the process helps."""
        ...

    def ledger(self, gpu: int | None = None) -> KVLedger:
        """Bytes of the region of ``gpu`` (the host's first): used by blocks,
        stranded in partly used slabs, free, lost to the null slab and the tail.
        Weights and idle cached prefixes count as used."""
        ...

    def restart(self, engine: int) -> None:
        """Start a dead engine again, and with it all of its device where that died. Raises RuntimeError where the thread that
        steps it hangs, or there is no room for the device any more."""
        ...

    def add(self, engine: EngineConfig) -> int:
        """Start one more engine beside those that serve; its id. Raises ValueError for one that cannot work here, RuntimeError
        where it does not start, or has no room now; nothing is left behind then. Do not call it from a listener."""
        ...

    def check(self, engine: EngineConfig) -> None:
        """Raises ValueError for an engine that ``add`` would never take."""
        ...

    def remove(self, engine: int) -> None:
        """End an engine that has no requests, for good; no listener hears of it. Its id may be given to another. Do not call
        it from a listener."""
        ...

    def holds_up(self, engine: int) -> bool:
        """Whether the engine's process holds a lock for which the others of its device wait."""
        ...

    def end_hung(self, engines: Sequence[int], reason: str) -> None:
        """End one of these engines, which give no sign of life: that for which the others may wait, else the first. Its death
        is reported as any other. What shares its thread or its Ray actor dies with it."""
        ...

    def quit(self) -> None:
        """Call it before ``close``, from any thread: threads that wait for an engine to start get a RuntimeError."""
        ...

    def close(self) -> None:
        """Stop every engine and remove the region. Idempotent."""
        ...
