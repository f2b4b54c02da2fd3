"""The worker class that engines on a CPU name as their ``worker_cls``."""

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  (it insists on being imported before other workers)

from fineserve_runtime.engines.vllm_worker import SlabWorker


class SlabCPUWorker(SlabWorker, CPUWorker):  # type: ignore[misc]
    """KV cache in shared memory."""
