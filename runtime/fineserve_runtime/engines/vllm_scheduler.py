"""vLLM's schedulers over leased slabs: the plain one on a CPU, the asynchronous one on a GPU.

``schedule`` runs under the table's lock, so what admission was promised it also gets. A block may be freed while a step that
may write it is still in flight. It goes back only when that step's output has come (vLLM's own fence for deferred frees).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from fineserve_runtime.engines import vllm_seams
from fineserve_runtime.engines.api import KvPart
from fineserve_runtime.engines.lookahead import LookaheadParts
from fineserve_runtime.engines.ranks import RankRegions
from fineserve_runtime.engines.settings import SlabSettings
from fineserve_runtime.engines.torch_region import open_region
from fineserve_runtime.engines.vllm_block_pool import SlabBlockPool
from fineserve_runtime.engines.vllm_carry import Carried
from fineserve_sim.policy.groups.microbatch import Chunk
from fineserve_sim.policy.interfaces import EngineState

_WANT_BLOCKS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class Composition(NamedTuple):
    """The composition of a step: prompt tokens, decodes, and tokens in the cache of its sequences before it."""

    prefill_tokens: int
    decodes: int
    context_tokens: int


class SlabScheduler(Scheduler):  # type: ignore[misc]
    """For backends that run one step at a time. ``preempted`` and ``schedule_s`` gather what happened since they were last
    taken; ``starved``: the last step found room for nothing; ``waits``: or nothing was ready to start (a grammar compiles)."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = SlabSettings.of(vllm_config.additional_config)
        regions = [open_region(rank.region_path, rank.device)[0] for rank in settings.ranks]
        self.region = regions[0] if len(regions) == 1 else RankRegions(regions)
        self.lease = settings.open_lease(self.region)
        self.carried = Carried(self.lease, vllm_config.cache_config.block_size)
        self._swaps = settings.swaps
        budget = vllm_config.scheduler_config.max_num_batched_tokens
        self._parts = LookaheadParts(budget, settings.lookahead) if settings.lookahead else None
        self._ended: list[Chunk] = []  # of the step that ended last
        with vllm_seams.block_pool(partial(SlabBlockPool, lease=self.lease)):
            super().__init__(vllm_config, *args, **kwargs)
        if settings.contiguous:  # vLLM caps what it allocates ahead at the longest sequence
            self.num_lookahead_tokens = vllm_config.model_config.max_model_len
        limits = vllm_config.scheduler_config
        self._active_limit = limits.max_num_active_seqs or limits.max_num_seqs
        self.defer_block_free = vllm_config.max_concurrent_batches > 1
        self.preempted: list[str] = []
        self.schedule_s = 0.0
        self.begun_s: float | None = None  # of the step that ended last, until it is reported
        self._under_way: deque[float] = deque()
        self.starved = self.waits = False
        self.composition = Composition(0, 0, 0)
        self._unprefilled: dict[str, int] = {}  # prompt tokens to compute, of requests that do not decode

    @property
    def pool(self) -> SlabBlockPool:
        pool: SlabBlockPool = self.kv_cache_manager.block_pool
        return pool

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        self._unprefilled[request.request_id] = request.num_tokens - self.carried.tokens_of(request.request_id)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        started_s = time.monotonic()
        self._under_way.append(started_s)
        with self.lease.exclusive():
            self.pool.make_room()
            self.max_num_active_reqs = self._active_limit if self.lease.may_start() else 0
            self.pool.free_blocks(self.carried.take_room(self.requests.keys()))
            self.connector: Carried | None = self.carried  # at vLLM's door for KV from elsewhere, until the next line
            if self._parts:
                self._parts.begin(self._waiting_work())
            output = super().schedule(throttle_prefills)
            if self._parts:
                self._parts.end({int(id): tokens for id, tokens in output.num_scheduled_tokens.items()})
            self.connector = None
            idle = not output.total_num_scheduled_tokens and not self.running
            self.starved = idle and any(request.status in _WANT_BLOCKS for request in self.waiting)
            self.waits = idle and bool(self.waiting)
            if self.starved:
                self.lease.starve()
        if self.pool.enable_caching:
            for new in output.scheduled_new_reqs:
                self.lease.counters.add("prefix_queries", len(new.prompt_token_ids or ()))
                self.lease.counters.add("prefix_hits", new.num_computed_tokens)
        for request_id in output.preempted_req_ids or ():
            self.preempted.append(request_id)
            left = self.requests[request_id].num_tokens - self.carried.tokens_of(request_id)
            self._unprefilled[request_id] = left
        self.schedule_s += time.monotonic() - started_s
        return output

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        if self._swaps and request.num_computed_tokens:
            self.carried.put(request.request_id, self._kv_of(request, 0))
        super()._preempt_request(request, *args, **kwargs)

    # --- KV that goes elsewhere and comes from there -------------------------------------------------------------------

    def copy_kv(self, request_id: str, first_block: int, *, whole: bool) -> KvPart | None:
        """The blocks of a request that decodes, from ``first_block`` on; ``whole``: the last one, too, which is not full. None
        for one that does not decode."""
        request = self.requests.get(request_id)
        if request is None or request.status != RequestStatus.RUNNING or request_id in self._unprefilled:
            return None
        part = self._kv_of(request, first_block)
        full = part.tokens // self.block_size
        return part if whole else part._replace(tokens=full * self.block_size, blocks=part.blocks[: full - first_block])

    def hold_kv(self, request_id: str, part: KvPart, *, last: bool) -> bool:
        """Keep KV of a request to come, and blocks for it. False when there are not as many; the last part stays all the same:
        its request will wait for room. False, too, when the parts before it are gone."""
        if not self.carried.continues(request_id, part):
            return False
        with self.lease.exclusive():
            self.pool.make_room()
            wanted, free = len(part.blocks), self.pool.get_num_free_blocks()
            if wanted <= free or last:
                room = self.pool.get_new_blocks(min(wanted, free))
                self.lease.set_aside(block.block_id for block in room)
                self.carried.put(request_id, part, room)
            return wanted <= free or last

    def stay_below(self, slab: int | None) -> None:
        """Lease no slab from this one on. Requests with blocks there start again elsewhere, with their KV; no step is in
        flight."""
        self.lease.stay_below(slab)
        self.pool.forget_idle()
        for request in [each for each in self.running if self.lease.reaches(self._blocks_of(each))]:
            self.running.remove(request)
            self.carried.put(request.request_id, self._kv_of(request, 0))
            super()._preempt_request(request, time.monotonic())
            self._unprefilled[request.request_id] = request.num_tokens - self.carried.tokens_of(request.request_id)
        self.prev_step_scheduled_req_ids.clear()  # as vLLM does where it preempts between two steps
        self.lease.look()

    def forget_kv(self, request_id: str) -> None:
        self.pool.free_blocks(self.carried.forget(request_id))

    def _kv_of(self, request: Any, first_block: int) -> KvPart:
        tokens: int = request.num_computed_tokens
        ids = self._blocks_of(request)[first_block : -(-tokens // self.block_size)]
        return KvPart(first_block, tokens, self.lease.read_blocks(ids))

    def _blocks_of(self, request: Any) -> list[int]:
        (ids,) = self.kv_cache_manager.get_block_ids(request.request_id)
        return list(ids)

    def _get_new_block_ids_to_zero(self) -> list[int] | None:
        self.kv_cache_manager.take_new_block_ids()
        return self.lease.take_stale() or None

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        self.begun_s, self.composition = self._under_way.popleft(), _composition(scheduler_output)
        self._ended = _chunks(scheduler_output) if self._parts else []
        unfinished = len(self.requests)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._note_prefills(scheduler_output.num_scheduled_tokens)
        if len(self.requests) < unfinished:
            self.lease.thrive()
        return outputs

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """vLLM's own reason to shorten a chunk, and the part of the microbatch that this step is."""
        tokens: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return self._parts.share(int(request.request_id), tokens) if self._parts else tokens

    def _waiting_work(self) -> list[Chunk]:
        """All prefills that go on or could start now, as far as memory goes."""
        work, free_tokens = [], self.pool.get_num_free_blocks() * self.block_size
        ready = [request for request in self.waiting if request.status in _WANT_BLOCKS]  # none whose grammar compiles
        for request in (*self.running, *ready):
            done = request.num_computed_tokens or self.carried.tokens_of(request.request_id)
            left = request.num_tokens - done
            if request.request_id in self._unprefilled and left > 0:
                free_tokens -= left
                if free_tokens < 0:
                    break
                work.append(Chunk(int(request.request_id), done, left))
        return work

    def note_duration(self, seconds: float) -> None:
        """The step that ended last took so long."""
        if self._parts:
            self._parts.observe(self._ended, seconds)

    def _note_prefills(self, scheduled: Iterable[str]) -> None:
        """Note how much is left to prefill of each scheduled request. A request decodes once it has put out a token."""
        for request_id in self._unprefilled.keys() & scheduled:
            request = self.requests.get(request_id)
            left = 0 if request is None else request.num_tokens - request.num_computed_tokens
            if request is None or (request.num_output_tokens and left <= 1):
                del self._unprefilled[request_id]
            else:
                self._unprefilled[request_id] = max(0, left)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        if finished:
            self.lease.thrive()
            for request in finished:
                self.forget_kv(request.request_id)
            for request_id in self._unprefilled.keys() - self.requests.keys():
                del self._unprefilled[request_id]
        return finished

    def engine_state(self) -> EngineState:
        """The state that a local scheduler of the policy core sees. Dispatched requests count as running, as in the simulator;
        prompts whose grammar is being made do not count."""
        status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        compiling = {id for id in self._unprefilled.keys() & self.requests.keys() if self.requests[id].status == status}
        ready = [left for id, left in self._unprefilled.items() if id not in compiling]
        promised = len(self.requests)
        return EngineState(
            running=promised,
            decoding=promised - len(self._unprefilled),
            prefill_tokens=sum(ready),
            free_slots=max(0, self._active_limit - promised),
            free_kv_tokens=self.pool.get_num_free_blocks() * self.block_size,
            slowdown=1.0,
        )


def _composition(output: SchedulerOutput) -> Composition:
    cached = output.scheduled_cached_reqs
    if output.total_num_scheduled_tokens == len(cached.req_ids) and all(cached.num_output_tokens):
        return Composition(0, len(cached.req_ids), sum(cached.num_computed_tokens))  # the common case: all decode
    prefill_tokens = decodes = context_tokens = 0
    for new in output.scheduled_new_reqs:
        prefill_tokens += output.num_scheduled_tokens[new.req_id]
        context_tokens += new.num_computed_tokens
    for request_id, computed, generated in zip(
        cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
    ):
        tokens = output.num_scheduled_tokens[request_id]
        context_tokens += computed
        if tokens == 1 and generated:
            decodes += 1
        else:
            prefill_tokens += tokens
    return Composition(prefill_tokens, decodes, context_tokens)


def _chunks(output: SchedulerOutput) -> list[Chunk]:
    """The tokens that a step computed of each request."""
    cached = output.scheduled_cached_reqs
    done = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    done |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    return [Chunk(int(id), done[id], tokens) for id, tokens in output.num_scheduled_tokens.items()]


class SlabAsyncScheduler(SlabScheduler, AsyncScheduler):  # type: ignore[misc]
    """For GPUs: the next step is scheduled while the last one runs."""
