"""The worker classes that engines on a CPU name as their ``worker_cls``."""

from typing import Any

import numpy as np
import torch

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  (it insists on being imported before other workers)

from fineserve_runtime.engines import vllm_seams
from fineserve_runtime.engines.vllm_worker import SlabWorker


class PatientCPUWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's own, but a rank sleeps while it waits for another one."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        torch.cpu._init_amx()  # vLLM's attention uses a processor's tiles without asking the kernel for them, and dies of it
        super().__init__(vllm_config, *args, **kwargs)
        if vllm_config.parallel_config.world_size > 1:  # then its process is this rank's alone
            vllm_seams.wait_asleep()

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Tokens that follow a part of a prompt are thrown away, and vLLM sets their generators back, which raises on a CPU:
        those are kept out of it."""
        runner = self.model_runner
        generators = runner.input_batch.generators
        partial = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0].tolist()
        unused = {index: generators.pop(index) for index in partial if index in generators}
        try:
            return super().sample_tokens(*args, **kwargs)
        finally:
            generators.update(unused)


class SlabCPUWorker(SlabWorker, PatientCPUWorker):
    """KV cache in shared memory."""
