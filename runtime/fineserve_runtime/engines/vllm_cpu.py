"""The worker classes that engines on a CPU name as their ``worker_cls``."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  (it insists on being imported before other workers)

from fineserve_runtime.engines import vllm_seams
from fineserve_runtime.engines.vllm_worker import SlabWorker


class PatientCPUWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's own, but a rank sleeps while it waits for another one."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        if vllm_config.parallel_config.world_size > 1:  # then its process is this rank's alone
            vllm_seams.wait_asleep()


class SlabCPUWorker(SlabWorker, PatientCPUWorker):
    """KV cache in shared memory."""
