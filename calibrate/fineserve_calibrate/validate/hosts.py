"""What lies around an engine's steps: its server, and generations of its scheduler.

Stated once, for every set that was measured through an HTTP server; no set but LMBench's idle runs, which are not reported,
had a say in it.
"""

from __future__ import annotations

from fineserve_sim.catalog import deployment

FRONT_END_S = 0.0089
"""HTTP, tokenizer and, in LMBench, a gateway: median of what TTFT exceeds the engine's in LMBench's runs at up to
``lmbench.FITTED_QPS``, where nobody waits."""

SYNCHRONOUS_V1 = deployment("vllm-v1")
"""vLLM V1 with CUDA graphs before it scheduled a step ahead by default (0.8 to 0.13): scheduling, input copies and sampling
lie between two steps."""

STEPS_AHEAD = 1
"""Of vLLM from 0.14 on: while a step runs the next is scheduled, and a request that comes meanwhile is in the one after."""
