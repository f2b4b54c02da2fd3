"""One vLLM engine core in this process, stepped by hand: requests in, step reports out."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from fineserve_runtime.engines.api import (
    Device,
    EngineConfig,
    FinishReason,
    KvPart,
    Lent,
    StepReport,
    Submission,
    TokenChunk,
)
from fineserve_runtime.engines.loop import RankDied
from fineserve_runtime.engines.settings import SlabSettings
from fineserve_runtime.engines.table import RegionError
from fineserve_runtime.engines.vllm_sampling import logprobs, vllm_sampling
from fineserve_sim.policy.interfaces import EngineState

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_XGRAMMAR_CACHE_MB": "16",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Set before vllm is imported, where the user has not set them. Engine cores run in process, nothing is fetched or sent, and
compiled grammars are kept up to 16 MB by the library's count, which is half of what they take. On a CPU oneDNN, and torch's
layer over it, make code for each shape of a matrix product, so for each number of tokens, and keep 128. Their own 1,024 let an
engine grow by half a gigabyte while new numbers come. An engine has one thread: two threads of two engines on two cores turn
steps of 3 ms into 50. It runs on any free core; else vLLM wants a NUMA node a rank."""

_SEEN_S = 2.0
"""Within so long the end of a rank is seen."""

_SCHEDULER = {"cpu": "SlabScheduler", "cuda": "SlabAsyncScheduler"}
_WORKER = {"cpu": "vllm_cpu.SlabCPUWorker", "cuda": "vllm_worker.SlabWorker"}
_PACKAGE = "fineserve_runtime.engines"
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}


_WORD_S = 0.01
"""So often an engine reports that only waits for grammars."""


def prepare_environment() -> None:
    """Call it before anything imports vllm."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def engine_arguments(config: EngineConfig, model_dir: Path, device: Device, region_bytes: int) -> dict[str, Any]:
    """The arguments of vLLM's EngineArgs that a stock engine of this configuration would get. Engines of several ranks are
    on CPUs."""
    ranks = max(1, len(config.gpus))
    several = {
        "tensor_parallel_size": ranks // config.stages,
        "pipeline_parallel_size": config.stages,
        "distributed_executor_backend": "mp",
        "async_scheduling": False,
        "worker_cls": f"{_PACKAGE}.vllm_cpu.PatientCPUWorker",
    }
    return {
        "model": str(model_dir),
        "skip_tokenizer_init": not (model_dir / "tokenizer_config.json").exists(),  # structured outputs need it
        "dtype": config.dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "block_size": config.block_tokens,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_sequences,
        "max_num_batched_tokens": config.max_batched_tokens,
        "enable_prefix_caching": config.prefix_caching,
        "kv_cache_memory_bytes": region_bytes,
        "gpu_memory_utilization": 0.05,
        "enforce_eager": device == "cpu",
        "scheduling_policy": "priority",
        "distributed_executor_backend": "uni",
        "disable_log_stats": True,
        **({"runner": "pooling", "convert": "embed"} if config.embeds else {}),
    } | (several if ranks > 1 else {})


def slab_arguments(config: EngineConfig, model_dir: Path, settings: SlabSettings, region_bytes: int) -> dict[str, Any]:
    """The same engine over the slab: other classes, and where the region is."""
    arguments = engine_arguments(config, model_dir, settings.device, region_bytes)
    return arguments | {
        "scheduler_cls": f"{_PACKAGE}.vllm_scheduler.{_SCHEDULER[settings.device]}",
        "worker_cls": f"{_PACKAGE}.{_WORKER[settings.device]}",
        "additional_config": settings.as_additional_config(),
        "enforce_eager": arguments["enforce_eager"] or settings.weights_in_region,
    }


def build_core(arguments: dict[str, Any]) -> Any:
    """An EngineCore in this process. Takes seconds. Errors are vLLM's own."""
    prepare_environment()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    from fineserve_runtime.engines.vllm_seams import calm_groups, wait_asleep

    vllm_config = EngineArgs(**arguments).create_engine_config()
    one_rank = vllm_config.parallel_config.world_size == 1
    if not one_rank:
        wait_asleep()
    core = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
    if one_rank:
        calm_groups()
    return core


class SteppedCore:
    """An engine core and the requests in it. ``engine`` goes into its reports; ids are ints outside, strings in vLLM."""

    def __init__(self, core: Any, engine: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        from fineserve_runtime.engines.vllm_grammars import Grammars

        self.core = core
        self.engine = engine
        self._eos = eos_token_ids
        self._arrivals = 0
        self._aborted: list[TokenChunk] = []
        self._early: list[TokenChunk] = []  # of steps that ended between two reports
        self._grammars = Grammars(core)
        self._next_word_s = 0.0
        self.steps = 0
        self.preemptions = 0

    def add(self, submission: Submission) -> None:
        """Raises ValueError for what vLLM's own check finds: its front end, which would have asked, is not there. Constraints
        are checked later, beside the steps."""
        from vllm.v1.engine import EngineCoreRequest

        self._arrivals += 1
        embeds = self.core.vllm_config.model_config.runner_type == "pooling"
        request = EngineCoreRequest(
            request_id=str(submission.request_id),
            prompt_token_ids=list(submission.prompt_token_ids),
            mm_features=None,
            sampling_params=None if embeds else self._sampling(submission),
            pooling_params=self._pooling() if embeds else None,
            arrival_time=self._place(submission.request_id),  # orders requests of equal priority
            lora_request=None,
            cache_salt=submission.sampling.cache_salt,
            data_parallel_rank=None,
            priority=submission.priority,
        )
        self.core.add_request(*self.core.preprocess_add_request(request))

    def _place(self, request_id: int) -> float:
        """In the order of arrival; before all others for one whose KV is here, for it has waited elsewhere."""
        carried = getattr(self.core.scheduler, "carried", None)  # vLLM's own scheduler has none
        return -1.0 if carried and carried.tokens_of(str(request_id)) else float(self._arrivals)

    def _sampling(self, submission: Submission) -> Any:
        sampling = vllm_sampling(submission.sampling, self._eos)
        config = self.core.vllm_config
        tokenizer = getattr(self.core.structured_output_manager, "tokenizer", None)
        sampling.verify(config.model_config, config.speculative_config, None, tokenizer)
        return sampling

    def _pooling(self) -> Any:
        from vllm import PoolingParams

        pooling = PoolingParams(task="embed")
        pooling.verify(self.core.vllm_config.model_config)
        return pooling

    def refuse(self, request_id: int, problem: str) -> None:
        """A request that ``add`` failed on: it ends with reason "error" in the next report, and leaves nothing behind."""
        if str(request_id) in self.core.scheduler.requests:
            self.core.abort_requests([str(request_id)])
        self._grammars.forget(str(request_id))
        self._aborted.append(TokenChunk(request_id, (), "error", problem))

    def abort(self, request_id: int) -> None:
        """The request ends with reason "abort" in the next report. Unknown ids are ignored."""
        if str(request_id) in self.core.scheduler.requests:
            self.core.abort_requests([str(request_id)])
            self._grammars.forget(str(request_id))
            self._aborted.append(TokenChunk(request_id, (), "abort"))

    @property
    def has_work(self) -> bool:
        """Raises RankDied."""
        self._check_ranks()
        return bool(self.core.scheduler.has_requests() or self._aborted or self._early or self.core.batch_queue)

    @property
    def starved(self) -> bool:
        """Whether no sequence found room in the last step, or none was ready to start."""
        return bool(self.core.scheduler.waits)

    @property
    def unfinished(self) -> tuple[int, ...]:
        return tuple(map(int, self.core.scheduler.requests))

    def _check_ranks(self) -> None:
        """vLLM ends the other ranks when one is gone, and fails the calls that wait for them."""
        if getattr(self.core.model_executor, "is_failed", False):
            raise RankDied("the process of one of its ranks ended")

    def _await_end_of_rank(self) -> None:
        """A call may fail a moment before vLLM's own thread sees that a rank ended."""
        until_s = time.monotonic() + (_SEEN_S if self.core.vllm_config.parallel_config.world_size > 1 else 0.0)
        while not getattr(self.core.model_executor, "is_failed", False) and time.monotonic() < until_s:
            time.sleep(_SEEN_S / 100)

    def step(self) -> StepReport | None:
        """Run one step. None when nothing came of it: no request, no room for any, or the first step of several in flight.
        Raises RankDied."""
        scheduler = self.core.scheduler
        started_s = time.monotonic()
        try:
            outputs, _ = self.core.step_fn()
        except Exception:
            self._await_end_of_rank()
            self._check_ranks()
            raise
        chunks = tuple(self._early)
        chunks += tuple(self._chunk(output) for batch in (outputs or {}).values() for output in batch.outputs)
        self._early.clear()
        for request_id, problem in self._grammars.too_slow():
            self.refuse(int(request_id), problem)
        chunks += tuple(self._aborted)
        self._aborted.clear()
        preempted = tuple(map(int, scheduler.preempted))
        if not chunks and not preempted and not outputs and not self._is_heard_of(started_s):
            return None
        self.steps += 1
        self.preemptions += len(preempted)
        scheduler.note_duration(time.monotonic() - started_s)
        composition, schedule_s = scheduler.composition, scheduler.schedule_s
        begun_s = started_s if scheduler.begun_s is None else scheduler.begun_s
        scheduler.preempted, scheduler.schedule_s, scheduler.begun_s = [], 0.0, None
        return StepReport(
            engine=self.engine,
            started_s=begun_s,
            ended_s=time.monotonic(),
            schedule_s=schedule_s,
            prefill_tokens=composition.prefill_tokens,
            decodes=composition.decodes,
            context_tokens=composition.context_tokens,
            chunks=chunks,
            preempted=preempted,
            state=scheduler.engine_state(),
        )

    def _is_heard_of(self, now_s: float) -> bool:
        """Whether an engine that only waits for grammars is to report all the same: its scheduler is asked at its reports, and
        may have others to start."""
        if not self.core.scheduler.requests or self.core.scheduler.starved or now_s < self._next_word_s:
            return False
        self._next_word_s = now_s + _WORD_S
        return bool(self.core.scheduler.waits)

    def state(self) -> EngineState:
        self.core.scheduler.lease.look()
        state: EngineState = self.core.scheduler.engine_state()
        return state

    def publish(self) -> None:
        """Write the engine's figures into the table, for onlookers."""
        scheduler = self.core.scheduler
        lease, row = scheduler.lease, scheduler.lease.counters
        row.set("used_bytes", lease.used_blocks * lease.block_bytes)
        row.set("spare_bytes", lease.spare_bytes)
        row.set("cached_bytes", scheduler.pool.idle_blocks * lease.block_bytes)
        row.set("steps", self.steps)
        row.set("preemptions", self.preemptions)

    def copy_kv(self, request_id: int, first_block: int, stop: bool) -> KvPart | None:
        """As `api.EngineHandle` says."""
        part: KvPart | None = self.core.scheduler.copy_kv(str(request_id), first_block, whole=stop)
        if stop and part is not None:
            self.core.abort_requests([str(request_id)])
            self._grammars.forget(str(request_id))
        return part

    def hold_kv(self, request_id: int, part: KvPart, last: bool) -> bool:
        return bool(self.core.scheduler.hold_kv(str(request_id), part, last=last))

    def forget_kv(self, request_id: int) -> None:
        self.core.scheduler.forget_kv(str(request_id))

    # --- layers that come and go -----------------------------------------------------------------------------------------

    def evacuate(self, with_kv: bool) -> list[tuple[int, KvPart | None]]:
        """As `api.EngineHandle` says; so do the four methods below."""
        scheduler = self.core.scheduler
        here = list(scheduler.requests)
        found = [(int(id), scheduler.copy_kv(id, 0, whole=True) if with_kv else None) for id in here]
        self.core.abort_requests(here)
        for id in here:
            self._grammars.forget(id)
        scheduler.reset_prefix_cache()
        return found

    def droppable_bytes(self) -> int:
        return int(self.core.model_executor.collective_rpc("droppable_bytes")[0])

    def drop_layers(self) -> Lent:
        lent: Lent = self.core.model_executor.collective_rpc("drop_layers")[0]
        return lent

    def borrow(self, lent: tuple[Lent, ...]) -> None:
        self.core.model_executor.collective_rpc("borrow_weights", args=(lent,))

    def vacate(self, first_slab: int | None) -> None:
        self._end_steps_in_flight()
        self.core.scheduler.stay_below(first_slab)

    def _end_steps_in_flight(self) -> None:
        """Their tokens are in the next report."""
        from vllm.v1.core.sched.interface import PauseState

        scheduler = self.core.scheduler
        scheduler.set_pause_state(PauseState.PAUSED_ALL)  # else each step that ends begins another
        while any(output.total_num_scheduled_tokens for _, output, *_ in self.core.batch_queue or ()):
            outputs, _ = self.core.step_fn()
            self._early += [self._chunk(output) for batch in (outputs or {}).values() for output in batch.outputs]
        scheduler.set_pause_state(PauseState.UNPAUSED)

    @property
    def keeps_prefixes(self) -> bool:
        """Or other memory that it could do without."""
        return bool(self.core.scheduler.pool.idle_blocks or self.core.scheduler.lease.spare_bytes)

    def make_room(self) -> None:
        """Give it up if others need the room."""
        self.core.scheduler.pool.make_room()

    def sleep(self) -> None:
        """Weights to host memory, all slabs back. Raises RuntimeError while requests are left or weights lie elsewhere."""
        if self.unfinished:
            raise RuntimeError(f"engine {self.engine} still has {len(self.unfinished)} requests; drain it first")
        self.core.scheduler.reset_prefix_cache()
        self.core.scheduler.lease.give_up_spares()
        self._ask_ranks("evict_weights")

    def wake(self) -> None:
        """Raises RegionError when no run of free slabs is long enough on a device; then no rank keeps its weights there."""
        try:
            self._ask_ranks("activate_weights")
        except RegionError:
            if self.core.vllm_config.parallel_config.world_size > 1:
                self._ask_ranks("evict_weights")
            raise

    def _ask_ranks(self, method: str) -> None:
        problems = [problem for problem in self.core.model_executor.collective_rpc(method) if problem]
        if problems:
            raise RegionError("; ".join(problems))

    def close(self) -> None:
        """Let go of the region, and end ranks that are processes of their own. In this process vLLM's own shutdown would also
        take the process groups that other engines here still use."""
        if self.core.vllm_config.parallel_config.world_size > 1:
            self.core.model_executor.shutdown()
        self._grammars.close()
        self.core.scheduler.shutdown()
        self.core.scheduler.lease.close()

    def _chunk(self, output: Any) -> TokenChunk:
        reason = None if output.finish_reason is None else _REASONS.get(str(output.finish_reason), "error")
        problem = self._grammars.problem(output.request_id) if reason == "error" else ""
        if reason is not None:
            self._grammars.forget(output.request_id)
        found = logprobs(output.new_prompt_logprobs_tensors) + logprobs(output.new_logprobs)
        vector = () if output.pooling_output is None else tuple(output.pooling_output.float().tolist())
        return TokenChunk(int(output.request_id), tuple(output.new_token_ids), reason, problem, found, vector)
