"""Engines without vLLM behind the protocols of ``engines/api.py``: they batch, preempt, run out of memory, sleep and die.

The next token is a hash of everything before it, so a request that was preempted, or goes on elsewhere, must end with
the same tokens as one that was left alone. With ``step_s=None`` engines step when a test says so; else by themselves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

from fineserve_runtime.engines.api import (
    EngineConfig,
    EngineDied,
    EngineListener,
    EngineStats,
    FinishReason,
    HostConfig,
    KvPart,
    Lent,
    Logprobs,
    StepReport,
    Submission,
    TokenChunk,
)

from fineserve_sim.policy.interfaces import EngineState, KVLedger

EOS = 1
REFUSED_TOKEN = 255
"""An engine refuses a prompt with it, after it was submitted."""
BLOCK_BYTES = 1024


def next_token(tokens: Sequence[int]) -> int:
    """2 to 201; never the end token."""
    return 2 + crc32(b"".join(token.to_bytes(4, "little") for token in tokens)) % 200


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def embedded(prompt: Sequence[int]) -> tuple[float, ...]:
    """Four numbers that depend on every token."""
    return tuple(next_token([*prompt, place]) / 256 for place in range(4))


@dataclass(eq=False)
class Sequence_:
    """A request in an engine: ``computed`` of its tokens are in KV memory."""

    submission: Submission
    tokens: list[int]
    computed: int = 0
    blocks: int = 0
    generated: int = 0
    aborted: bool = False

    @property
    def prefilling(self) -> bool:
        return self.computed < len(self.tokens) - (1 if self.generated else 0)


@dataclass(eq=False)
class FakeEngine:
    id: int
    config: EngineConfig
    host: FakeHost
    alive: bool = True
    asleep: bool = False
    waiting: list[Sequence_] = field(default_factory=list)
    running: list[Sequence_] = field(default_factory=list)
    steps: int = 0
    preemptions: int = 0
    fails_to_wake: int = 0
    silent_s: float = 0.0
    submitted: list[Submission] = field(default_factory=list)
    refused: list[TokenChunk] = field(default_factory=list)
    carried: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    """KV of requests to come: their computed tokens, and how many blocks are kept for them."""
    calls_left: int | None = None
    """After so many calls that move KV or layers it dies; None: it does not."""
    dropped: bool = False
    below: int | None = None
    """As ``vacate`` said."""
    telling: threading.RLock = field(default_factory=threading.RLock)
    """Held while the listener is told, so that it hears of one thing at a time, in order, and of no step after its death."""
    eos_token_ids: tuple[int, ...] = (EOS,)
    block_bytes: int = BLOCK_BYTES

    @property
    def model_dir(self) -> Path:
        raise NotImplementedError("fake engines have no files")

    @property
    def gpus(self) -> tuple[int, ...]:
        return self.host.config.gpus_of(self.config)

    @property
    def kv_capacity_tokens(self) -> int:
        left = self.host.config.region_bytes - self.host.weights_now()
        limit = left if self.config.kv_limit_bytes is None else self.config.kv_limit_bytes
        return min(left, limit) // BLOCK_BYTES * self.config.block_tokens

    # --- the protocol ----------------------------------------------------------------------------------------------

    def submit(self, submission: Submission) -> None:
        with self.host.lock:
            if not self.alive:
                raise EngineDied(f"engine {self.id} is dead")
            if self.asleep:
                raise RuntimeError(f"engine {self.id} sleeps")
            if not 0 < len(submission.prompt_token_ids) < self.config.max_model_len:
                raise ValueError(f"prompt of {len(submission.prompt_token_ids)} tokens")
            self.submitted.append(submission)
            if REFUSED_TOKEN in submission.prompt_token_ids:
                self.refused.append(TokenChunk(submission.request_id, (), "error", "ValueError: no such token here"))
                self.host.lock.notify_all()
                return
            self.waiting.append(Sequence_(submission, list(submission.prompt_token_ids)))
            self.waiting.sort(key=lambda s: s.submission.priority)
            self.host.lock.notify_all()

    def abort(self, request_id: int) -> None:
        with self.host.lock:
            for sequence in [*self.waiting, *self.running]:
                if sequence.submission.request_id == request_id:
                    sequence.aborted = True
            self.host.lock.notify_all()

    def state(self) -> EngineState:
        with self.host.lock:
            here = [*self.waiting, *self.running]
            left = sum(len(s.tokens) - s.computed for s in here if s.prefilling)
            decoding = sum(not s.prefilling for s in self.running)
            free_tokens = self._free_blocks() * self.config.block_tokens
            return EngineState(len(here), decoding, left, self.config.max_sequences - len(here), free_tokens, 1.0)

    def copy_kv(self, request_id: int, first_block: int, *, stop: bool = False) -> KvPart | None:
        """The KV of a block are its tokens."""
        self._count_call()
        with self.telling, self.host.lock:
            found = [s for s in self.running if s.submission.request_id == request_id and not s.prefilling]
            if not found:
                return None
            (sequence,) = found
            size = self.config.block_tokens
            tokens = sequence.computed if stop else sequence.computed // size * size
            if stop:
                self.running.remove(sequence)
                self.host.lock.notify_all()
            starts = range(first_block * size, tokens, size)
            blocks = [sequence.tokens[start : min(start + size, tokens)] for start in starts]
            return KvPart(first_block, tokens, tuple(bytes(block) for block in blocks))

    def hold_kv(self, request_id: int, part: KvPart, *, last: bool = False) -> bool:
        self._count_call()
        with self.host.lock:
            tokens, room = self.carried.get(request_id, ([], 0))
            gap = len(tokens) < part.first_block * self.config.block_tokens
            if gap or (len(part.blocks) > self._free_blocks() and not last):
                return False
            tokens = [*tokens, *b"".join(part.blocks)]
            assert len(tokens) == part.tokens
            self.carried[request_id] = tokens, room + min(len(part.blocks), self._free_blocks())
            return True

    def forget_kv(self, request_id: int) -> None:
        with self.host.lock:
            self.carried.pop(request_id, None)

    def evacuate(self, *, with_kv: bool) -> list[tuple[int, KvPart | None]]:
        self._count_call()
        with self.telling, self.host.lock:
            here = [*self.waiting, *self.running]
            parts = [self._whole_kv(s) if with_kv and s in self.running and not s.prefilling else None for s in here]
            self.waiting, self.running = [], []
            self.host.lock.notify_all()
            return [(s.submission.request_id, part) for s, part in zip(here, parts, strict=True)]

    def _whole_kv(self, sequence: Sequence_) -> KvPart:
        size, tokens = self.config.block_tokens, sequence.computed
        blocks = [sequence.tokens[at : min(at + size, tokens)] for at in range(0, tokens, size)]
        return KvPart(0, tokens, tuple(bytes(block) for block in blocks))

    def droppable_bytes(self) -> int:
        return self.host.weight_bytes // 2

    def drop_layers(self) -> Lent:
        self._count_call()
        assert not self.has_work, "it has requests"
        self.asleep = self.dropped = True
        return Lent(7, {})

    def borrow(self, lent: Sequence[Lent]) -> None:
        self._count_call()
        assert len(lent) == len(self.gpus)

    def vacate(self, first_slab: int | None) -> None:
        self._count_call()
        self.below = first_slab

    @property
    def weight_bytes(self) -> int:
        """That it holds now."""
        if self.dropped:
            return self.host.weight_bytes // 2
        return 0 if self.asleep or not self.alive or self.config.borrows else self.host.weight_bytes

    def _count_call(self) -> None:
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                self.calls_left = None
                self.host.kill(self.id)
        if not self.alive:
            raise EngineDied(f"engine {self.id} is dead")

    def stats(self, gpu: int | None = None) -> EngineStats:
        with self.host.lock:
            used = self.used_blocks * BLOCK_BYTES
            return EngineStats(used, used, 0, 0, self.weight_bytes, self.steps, self.preemptions, 0, 0, 0)

    def drain(self, timeout_s: float) -> bool:
        if self.host.step_s is None:
            while self.has_work:
                self.host.step(self.id)
            return True
        with self.host.lock:
            drained = self.host.lock.wait_for(lambda: not self.has_work, timeout_s)
        with self.telling:
            return drained

    def sleep(self) -> float:
        with self.host.lock:
            if self.has_work:
                raise RuntimeError(f"engine {self.id} has requests")
            self.asleep = True
            return 0.001

    def wake(self) -> float:
        with self.host.lock:
            if self.fails_to_wake:
                self.fails_to_wake -= 1
                raise RuntimeError("no memory for weights")
            if not self.alive:
                raise EngineDied(f"engine {self.id} is dead")
            if self.host.free_bytes() < (0 if self.config.borrows else self.host.weight_bytes) - self.weight_bytes:
                raise RuntimeError("no memory for weights")
            self.asleep = self.dropped = False
            return 0.001

    # --- how it works ----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.refused)

    @property
    def used_blocks(self) -> int:
        kept = sum(room for _, room in self.carried.values())
        return kept + sum(sequence.blocks for sequence in self.running)

    def _free_blocks(self) -> int:
        free = self.host.free_bytes() // BLOCK_BYTES
        if self.config.kv_limit_bytes is not None:
            free = min(free, self.config.kv_limit_bytes // BLOCK_BYTES - self.used_blocks)
        return max(0, free)

    def step(self) -> StepReport | None:
        """One iteration: decodes first, then prompt chunks within the budget. None when nothing could be done."""
        started_s = time.monotonic()
        chunks = self._drop_aborted()
        preempted: list[int] = []
        context = sum(sequence.computed for sequence in self.running)
        decodes = [s for s in self.running if not s.prefilling and self._grow(s, len(s.tokens), preempted)]
        decodes = [s for s in decodes if s in self.running]
        budget = self.config.max_batched_tokens - len(decodes)
        prefilled = self._prefill(budget)
        for sequence in decodes:
            sequence.computed = len(sequence.tokens)
        for sequence in [*decodes, *(s for s in self.running if s not in decodes)]:
            if sequence.computed == len(sequence.tokens):
                chunks.append(self._emit(sequence))
        if not (chunks or prefilled or preempted):
            if not self.running:
                return None
            self._put_back(self.running.pop(), preempted)  # partial prefills of several engines block one another
        self.steps += 1
        self.preemptions += len(preempted)
        ended_s = max(time.monotonic(), started_s + 1e-6)
        return StepReport(
            self.id,
            started_s,
            ended_s,
            0.0,
            prefilled,
            len(decodes),
            context,
            tuple(chunks),
            tuple(preempted),
            self.state(),
        )

    def _drop_aborted(self) -> list[TokenChunk]:
        gone = [s for s in [*self.waiting, *self.running] if s.aborted]
        self.waiting = [s for s in self.waiting if not s.aborted]
        self.running = [s for s in self.running if not s.aborted]
        refused, self.refused = self.refused, []
        return [TokenChunk(s.submission.request_id, (), "abort") for s in gone] + refused

    def _grow(self, sequence: Sequence_, tokens: int, preempted: list[int]) -> bool:
        """Blocks for so many tokens; the latest running sequence makes room, perhaps this one itself."""
        while sequence in self.running:
            needed = -(-tokens // self.config.block_tokens) - sequence.blocks
            if needed <= self._free_blocks():
                sequence.blocks += max(0, needed)
                return True
            self._put_back(self.running.pop(), preempted)
        return False

    def _put_back(self, victim: Sequence_, preempted: list[int]) -> None:
        victim.blocks = victim.computed = 0
        self.waiting.insert(0, victim)
        preempted.append(victim.submission.request_id)

    def _prefill(self, budget: int) -> int:
        done = 0
        for sequence in [*(s for s in self.running if s.prefilling), *list(self.waiting)]:
            if (kept := self.carried.pop(sequence.submission.request_id, None)) is not None:
                assert kept[0] == sequence.tokens[: len(kept[0])], "the KV of other tokens"
                sequence.computed = len(kept[0])
            chunk = min(budget - done, len(sequence.tokens) - sequence.computed)
            needed = -(-(sequence.computed + chunk) // self.config.block_tokens) - sequence.blocks
            room = sequence in self.running or len(self.running) < self.config.max_sequences
            if chunk <= 0 or not room or needed > self._free_blocks():
                break
            if sequence in self.waiting:
                self.waiting.remove(sequence)
                self.running.append(sequence)
            sequence.blocks += needed
            sequence.computed += chunk
            done += chunk
        return done

    def _emit(self, sequence: Sequence_) -> TokenChunk:
        if self.config.embeds:
            self.running.remove(sequence)
            return TokenChunk(sequence.submission.request_id, (), "stop", vector=embedded(sequence.tokens))
        sampling = sequence.submission.sampling
        token = next_token(sequence.tokens)
        sequence.tokens.append(token)
        sequence.generated += 1
        reason: FinishReason | None = None
        if token in sampling.stop_token_ids:
            reason = "stop"
        elif sequence.generated >= sampling.max_tokens or len(sequence.tokens) >= self.config.max_model_len:
            reason = "length"
        if reason:
            self.running.remove(sequence)
        return TokenChunk(sequence.submission.request_id, (token,), reason, logprobs=_logprobs(sequence))


def _logprobs(sequence: Sequence_) -> tuple[Logprobs, ...]:
    """Of the newest token, and of the prompt with the first one, where they are wanted: -1, and -2 of the next id."""
    sampling = sequence.submission.sampling
    if sampling.logprobs is None:
        return ()
    first = sampling.prompt_logprobs is not None and sequence.generated == 1
    tokens = sequence.tokens[1:] if first else sequence.tokens[-1:]
    return tuple(((token, -1.0), (token + 1, -2.0)) for token in tokens)


class FakeHost:
    """A device with ``region_bytes`` for weights (``weight_bytes`` an engine that is awake) and KV blocks of 1 KiB."""

    def __init__(
        self, config: HostConfig, listener: EngineListener, *, weight_bytes: int = 0, step_s: float | None = None
    ) -> None:
        self.config = config
        self.listener = listener
        self.weight_bytes = weight_bytes
        self.step_s = step_s
        self.lock = threading.Condition(threading.RLock())
        self.engines: Mapping[int, FakeEngine] = {
            id: FakeEngine(id, engine, self) for id, engine in enumerate(config.engines)
        }
        self.restarts: list[int] = []
        self.failing_restarts = 0
        self.sound = True
        self.killed: list[int] = []
        self.lock_holders: set[int] = set()
        self._closed = False
        self._threads: list[threading.Thread] = []
        for id in self.engines:
            self._begin(id)

    def _begin(self, engine: int) -> None:
        if self.step_s is not None:
            thread = threading.Thread(target=self._run, args=(engine,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def free_bytes(self) -> int:
        used_blocks = sum(engine.used_blocks for engine in self.engines.values())
        return self.config.region_bytes - self.weights_now() - used_blocks * BLOCK_BYTES

    def weights_now(self) -> int:
        return sum(engine.weight_bytes for engine in self.engines.values())

    def ledger(self, gpu: int | None = None) -> KVLedger:
        with self.lock:
            free = self.free_bytes()
            return KVLedger(self.config.region_bytes, self.config.region_bytes - free, 0, free, 0)

    def restart(self, engine: int) -> None:
        with self.lock:
            self.restarts.append(engine)
            if self.failing_restarts:
                self.failing_restarts -= 1
                raise RuntimeError("it does not start")
            self.engines[engine].alive = True
            self.engines[engine].asleep = self.engines[engine].dropped = False
            self.engines[engine].silent_s = 0.0

    def add(self, engine: EngineConfig) -> int:
        with self.lock:
            if self.failing_restarts:
                self.failing_restarts -= 1
                raise RuntimeError("it does not start")
            number = max(self.engines, default=-1) + 1
            self.engines = {**self.engines, number: FakeEngine(number, engine, self)}
            self._begin(number)
            return number

    def check(self, engine: EngineConfig) -> None: ...

    def remove(self, engine: int) -> None:
        with self.lock:
            gone = self.engines[engine]
            assert not (gone.waiting or gone.running), "it has requests"
            gone.alive = False
            self.engines = {number: each for number, each in self.engines.items() if number != engine}
            self.lock.notify_all()

    def quit(self) -> None:
        """Nothing takes long here."""

    def holds_up(self, engine: int) -> bool:
        return engine in self.lock_holders

    def end_hung(self, engines: Sequence[int], reason: str) -> None:
        self.kill(engines[0], reason)

    def kill(self, engine: int, reason: str = "killed", *, crashed: bool = False) -> None:
        """The process is gone, with all that it held."""
        self.killed.append(engine)
        dead = self.engines[engine]
        with dead.telling:
            with self.lock:
                lost = tuple(s.submission.request_id for s in [*dead.waiting, *dead.running])
                dead.alive = dead.dropped = False
                dead.waiting, dead.running, dead.carried = [], [], {}
            self.listener.on_died(engine, reason, lost, crashed)
        if dead.config.keeps is not None:
            for borrower in [each.id for each in self.engines.values() if each.config.borrows and each.alive]:
                self.kill(borrower, "its lender died")

    def step(self, engine: int) -> bool:
        """One iteration of one engine and its report; False when it had nothing to do."""
        here = self.engines.get(engine)
        if here is None:
            return False
        with here.telling:
            with self.lock:
                report = here.step() if here.alive and not here.asleep and here.has_work else None
            if report is not None:
                self.listener.on_step(report)
        with self.lock:
            self.lock.notify_all()
        return report is not None

    def step_all(self) -> bool:
        return any([self.step(engine) for engine in self.engines])  # noqa: C419  # all of them

    def close(self) -> None:
        with self.lock:
            self._closed = True
            self.lock.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self, engine: int) -> None:
        here = self.engines[engine]
        assert self.step_s is not None
        while not self._closed and engine in self.engines:
            with self.lock:
                self.lock.wait_for(lambda: self._closed or engine not in self.engines or (here.alive and here.has_work))
            time.sleep(self.step_s)
            if not self._closed and engine in self.engines and not self.step(engine):
                time.sleep(self.step_s)
