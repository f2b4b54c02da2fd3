"""The runtime: FineServe's policy core drives real vLLM engines behind one OpenAI-compatible server.

Only ``fineserve_runtime.engines`` may import vllm or torch; everything else runs, and is tested, without them.
"""

from __future__ import annotations

__version__ = "0.1.0"
