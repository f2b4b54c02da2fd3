"""What other servers of this protocol have and this one has not: by the beginning of its path, why, or what instead."""

from __future__ import annotations

_POOLING = "of pooling models only those that embed are served; use /v1/embeddings"
_ONE_BY_ONE = "send the requests one by one"
_TEXT = "only text is served"
_WEIGHTS = "weights are those of the file; add and remove models with /admin/models"
_OPERATORS = "operators use /admin/models/NAME/sleep and /wake, with their own key"
_AUTOMATIC = "the runtime does this by itself"
_RENDERED = "prompts are rendered by the server; /tokenize shows their tokens"

_WHY = {
    "/v2/embed": _POOLING,
    "/pooling": _POOLING,
    "/classify": _POOLING,
    "/score": _POOLING,
    "/v1/score": _POOLING,
    "/generative_scoring": _POOLING,
    "/rerank": _POOLING,
    "/v1/rerank": _POOLING,
    "/v2/rerank": _POOLING,
    "/v1/moderations": _POOLING,
    "/v1/responses/render": _RENDERED,
    "/v1/responses/": "nothing is stored; POST /v1/responses answers at once",
    "/v1/load_lora_adapter": "LoRA adapters lie outside the memory that models share; serve the merged model",
    "/v1/unload_lora_adapter": "there are no LoRA adapters here",
    "/v1/audio": _TEXT,
    "/v1/images": _TEXT,
    "/v1/videos": _TEXT,
    "/v1/realtime": _TEXT,
    "/v1/batches": _ONE_BY_ONE,
    "/v1/files": _ONE_BY_ONE,
    "/v1/uploads": _ONE_BY_ONE,
    "/v1/chat/completions/batch": _ONE_BY_ONE,
    "/v1/chat/completions/": _RENDERED,
    "/v1/completions/": _RENDERED,
    "/v1/messages/batches": _ONE_BY_ONE,
    "/v1/messages/render": _RENDERED,
    "/cohere/": "use /v1/chat/completions",
    "/v1/systemone": "use /v1/chat/completions",
    "/invocations": "use /v1/chat/completions",
    "/inference/": "use /v1/completions, which takes token ids, too",
    "/v1/assistants": "nothing is stored; use /v1/chat/completions",
    "/v1/threads": "nothing is stored; use /v1/chat/completions",
    "/v1/vector_stores": "nothing is stored",
    "/v1/fine_tuning": "models are not trained here",
    "/tokenizer_info": "read the tokenizer in the model's folder",
    "/ping": "use /health",
    "/readyz": "use /ready",
    "/load": "read /metrics",
    "/server_info": "read /version and /v1/models",
    "/kv_event_sources": "there are no KV events; the decision log tells what happens",
    "/docs": "docs/runtime.md is the reference",
    "/sleep": _OPERATORS,
    "/wake_up": _OPERATORS,
    "/is_sleeping": "read the state in /v1/models",
    "/is_paused": "read the state in /v1/models",
    "/pause": _OPERATORS,
    "/resume": _OPERATORS,
    "/abort_requests": "a client that hangs up aborts its request",
    "/reset_prefix_cache": _AUTOMATIC,
    "/reset_mm_cache": _TEXT,
    "/reset_encoder_cache": _TEXT,
    "/release_kv_cache_memory": _AUTOMATIC,
    "/fault_tolerance": _AUTOMATIC,
    "/scale_elastic_ep": _AUTOMATIC,
    "/is_scaling_elastic_ep": _AUTOMATIC,
    "/collective_rpc": "engines are not open to clients",
    "/start_profile": "engines are not open to clients",
    "/stop_profile": "engines are not open to clients",
    "/get_world_size": _WEIGHTS,
    "/init_weight_transfer_engine": _WEIGHTS,
    "/shutdown_weight_transfer_engine": _WEIGHTS,
    "/start_weight_update": _WEIGHTS,
    "/start_draft_weight_update": _WEIGHTS,
    "/finish_weight_update": _WEIGHTS,
    "/update_weight": _WEIGHTS,
    "/weight_": _WEIGHTS,
}


def unserved(path: str) -> str | None:
    """Why there is no such endpoint, where other servers have one."""
    return next((why for start, why in _WHY.items() if path.startswith(start)), None)
