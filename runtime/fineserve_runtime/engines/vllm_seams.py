"""The few places where vLLM 0.32 has no entry point for what the slab needs, and the contract that all of it rests on.

Schedulers, workers, settings and the cache layout come in through vLLM's own doors (``scheduler_cls``, ``worker_cls``,
``additional_config``, ``get_supported_kv_cache_layouts``). Four names have no door. Each is replaced only while one object
is being built, and put back at once:

* ``BlockPool``, which the KV cache coordinator builds by name;
* ``allocate_kv_cache``, by which both model runners get a zeroed tensor of their own;
* ``dispatch_cpu_unquantized_gemm``, which on a CPU packs linear weights into private memory where no eviction finds them;
* ``GrammarCompiler``, which compiles a constraint with eight threads.

Processes of an engine with several ranks on a CPU keep two replacements, by which they sleep while they wait for each other
(`wait_asleep`). In one of a single rank the threads of vLLM's process groups give way (`calm_groups`).

`check_contract` names each part of vLLM that differs from what this code expects, before any engine is built.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

KNOWN_GOOD = ("0.32.0",)

_NAP_S = 50e-6

_SCHEDULER = "vllm.v1.core.sched.scheduler"
_POOL = "vllm.v1.core.block_pool"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_COMMUNICATORS = "vllm.distributed.device_communicators"

CONTRACT: dict[tuple[str, str], tuple[str, ...]] = {
    ("vllm.v1.core.kv_cache_coordinator", "BlockPool"): ("num_gpu_blocks", "enable_caching", "hash_block_size"),
    (_POOL, "BlockPool.get_new_blocks"): ("num_blocks",),
    (_POOL, "BlockPool.touch"): ("blocks",),
    (_POOL, "BlockPool.free_blocks"): ("ordered_blocks",),
    (_POOL, "BlockPool.get_num_free_blocks"): (),
    (_POOL, "BlockPool.get_usage"): (),
    (_POOL, "BlockPool.reset_prefix_cache"): (),
    (_POOL, "BlockPool._maybe_evict_cached_block"): ("block",),
    (_POOL, "BlockPool.unpin_blocks"): ("blocks", "on_reuse"),
    ("vllm.v1.core.kv_cache_utils", "KVCacheBlock"): ("block_id", "pool"),
    ("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.popleft"): (),
    ("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.append_n"): ("blocks",),
    (_SCHEDULER, "Scheduler"): ("vllm_config", "kv_cache_config", "structured_output_manager", "block_size"),
    (_SCHEDULER, "Scheduler.schedule"): ("throttle_prefills",),
    (_SCHEDULER, "Scheduler._get_new_block_ids_to_zero"): (),
    (_SCHEDULER, "Scheduler._preempt_request"): ("request",),
    (_SCHEDULER, "Scheduler._reserve_prefill_lookahead"): ("request", "num_computed_tokens", "num_new_tokens"),
    (_SCHEDULER, "Scheduler.set_pause_state"): ("pause_state",),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_block_ids"): ("request_id",),
    (_CONNECTOR, "KVConnectorBase_V1.get_num_new_matched_tokens"): ("request", "num_computed_tokens"),
    (_CONNECTOR, "KVConnectorBase_V1.update_state_after_alloc"): ("request", "blocks", "num_external_tokens"),
    (_CONNECTOR, "KVConnectorBase_V1.build_connector_meta"): ("scheduler_output",),
    (_CONNECTOR, "KVConnectorBase_V1.has_pending_block_frees"): (),
    (_SCHEDULER, "Scheduler.update_from_output"): ("scheduler_output", "model_runner_output"),
    (_SCHEDULER, "Scheduler.finish_requests"): ("request_ids", "finished_status"),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"): (),
    ("vllm.v1.worker.gpu_model_runner", "allocate_kv_cache"): ("kv_cache_config", "device", "layout"),
    ("vllm.v1.worker.utils", "create_kv_cache_views"): ("raw", "spec", "num_blocks", "layout", "kv_cache_tensor"),
    ("vllm.v1.worker.gpu_worker", "Worker.initialize_from_config"): ("kv_cache_config",),
    ("vllm.v1.worker.gpu_worker", "Worker.execute_model"): ("scheduler_output",),
    ("vllm.v1.worker.gpu_worker", "Worker.load_model"): (),
    ("vllm.v1.worker.worker_base", "WorkerBase.get_supported_kv_cache_layouts"): (),
    ("vllm.v1.engine.core", "EngineCore"): ("vllm_config", "executor_class", "log_stats"),
    ("vllm.v1.engine.core", "EngineCore.preprocess_add_request"): ("request",),
    ("vllm.v1.engine.core", "EngineCore.add_request"): ("request",),
    ("vllm.sampling_params", "SamplingParams.verify"): ("model_config", "structured_outputs_config", "tokenizer"),
    ("vllm.v1.structured_output", "StructuredOutputManager.grammar_init"): ("request",),
    ("vllm.v1.structured_output", "StructuredOutputManager._create_grammar"): ("request",),
    ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm"): ("layer", "remove_weight"),
    (f"{_COMMUNICATORS}.shm_broadcast", "sched_yield"): (),
    (f"{_COMMUNICATORS}.cpu_communicator", "CpuCommunicator._all_group_ranks_share_shm_group_name"): (),
}
"""(module, name) -> parameters that must be among its own."""


class UnsupportedVllm(RuntimeError):
    """The installed vLLM is not one that the slab is known to fit."""


def contract_problems() -> list[str]:
    """What of the contract the installed vLLM breaks; empty when it is as we know it."""
    problems = []
    for (module_name, path), parameters in CONTRACT.items():
        name = f"{module_name}.{path}"
        try:
            found = _resolve(module_name, path)
        except (ImportError, AttributeError):
            problems.append(f"{name} is gone")
            continue
        missing = [parameter for parameter in parameters if parameter not in inspect.signature(found).parameters]
        if missing:
            problems.append(f"{name} has no parameter {', '.join(missing)}")
    return problems


def check_contract() -> None:
    """Raise UnsupportedVllm, one sentence that names what changed, unless the slab fits the installed vLLM."""
    import vllm

    if problems := contract_problems():
        raise UnsupportedVllm(
            f"vLLM {vllm.__version__} does not fit the KV slab ({'; '.join(problems)}); "
            f"install vLLM {' or '.join(KNOWN_GOOD)}"
        )


def _resolve(module_name: str, path: str) -> Any:
    found: Any = importlib.import_module(module_name)
    for part in path.split("."):
        found = getattr(found, part)
    return found


@contextmanager
def _replaced(replacement: Any, *places: tuple[str, str]) -> Iterator[None]:
    modules = [(importlib.import_module(module), name) for module, name in places]
    originals = [getattr(module, name) for module, name in modules]
    for module, name in modules:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for (module, name), original in zip(modules, originals, strict=True):
            setattr(module, name, original)


@contextmanager
def block_pool(build: Callable[..., Any]) -> Iterator[None]:
    """KV cache coordinators built meanwhile get their pool from ``build``."""
    with _replaced(build, ("vllm.v1.core.kv_cache_coordinator", "BlockPool")):
        yield


@contextmanager
def kv_bytes(raw: torch.Tensor) -> Iterator[None]:
    """Model runners that allocate their KV cache meanwhile get views of ``raw`` (flat int8), which is not touched."""

    def views_of_raw(
        kv_cache_config: Any, device: torch.device, layout: Any, kernel_block_sizes: list[int] | None = None
    ) -> dict[str, torch.Tensor]:
        from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
        from vllm.v1.worker.utils import create_kv_cache_views

        views: dict[str, torch.Tensor] = {}
        for tensor in kv_cache_config.kv_cache_tensors:
            groups = kv_cache_config.kv_cache_groups
            index = next(i for i, group in enumerate(groups) if tensor.layers[0] in group.layer_names)
            spec = groups[index].kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[tensor.layers[0]]
            kernel_block_size = kernel_block_sizes[index] if kernel_block_sizes else None
            layers = create_kv_cache_views(
                raw, spec, kv_cache_config.num_blocks_of(tensor), layout, tensor, kernel_block_size=kernel_block_size
            )
            views.update(zip(tensor.layers, layers, strict=True))
        return views

    places = [("vllm.v1.worker.gpu_model_runner", "allocate_kv_cache")]
    if torch.cuda.is_available():  # the V2 runner, which needs Triton
        places.append(("vllm.v1.worker.gpu.attn_utils", "allocate_kv_cache"))
    with _replaced(views_of_raw, *places):
        yield


@contextmanager
def grammar_threads(count: int) -> Iterator[None]:
    """Compilers of grammars built meanwhile use so many threads each, and keep what vLLM lets them keep."""
    build = importlib.import_module("xgrammar").GrammarCompiler

    def compiler(*arguments: Any, **options: Any) -> Any:
        return build(*arguments, **options | {"max_threads": count})

    with _replaced(compiler, ("xgrammar", "GrammarCompiler")):
        yield


@contextmanager
def plain_linears() -> Iterator[None]:
    """Linear layers loaded meanwhile on a CPU keep their weight as a plain parameter and read it at every call."""

    def keep_plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    with _replaced(keep_plain, ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm")):
        yield


def wait_asleep() -> None:
    """Ranks on a CPU, and the process that schedules them, wait for each other asleep from now on. vLLM lets them spin and
    yield, which presumes a core for each. On fewer cores, ranks that spin keep the others from working. On
    Linux 6.18 two such ranks have kept all other processes off both cores for four minutes."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    shm_broadcast.sched_yield = partial(time.sleep, _NAP_S)
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False  # collectives by gloo, not by spinning


def calm_groups() -> None:
    """The threads of process groups give way to the thread that steps. For a process whose engine has one rank: they are never
    used there.

    gloo has a thread a group, 13 in all, and each of them looks for messages 100 times a second. Linux shares its processors
    among sessions first (autogroup), and a session's share goes to the processor on which most of its threads wait. So on two
    busy processors the 13 kept the thread that steps waiting for 0.1 to 0.8 s.
    """
    with contextlib.suppress(OSError, AttributeError):  # another operating system
        for task in Path("/proc/self/task").iterdir():
            if task.joinpath("comm").read_text().startswith("gloo"):
                os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
