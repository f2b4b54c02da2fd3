"""Read a model's geometry from its Hugging Face ``config.json``.

``FAMILIES`` says what a family has that its config does not. The rest is read alike for all: experts, windows, compressed and
linear attention have keys of their own. A model that sees has its text part in ``text_config``; text alone is served, and
``vision_config`` counts as weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fineserve_sim.catalog.architecture import Experts, LatentAttention, LinearAttention, ModelSpec, Window
from fineserve_sim.catalog.load import CatalogError

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"bias": "qkv"},
    "qwen3": {"qk_norm": True},
    "mixtral": {},
    "qwen3_moe": {"qk_norm": True},
    "qwen3_vl": {"qk_norm": True},
    "qwen3_vl_moe": {"qk_norm": True},
    "qwen3_5": {"qk_norm": True, "output_gate": True},
    "qwen3_5_moe": {"qk_norm": True, "output_gate": True},
    "qwen3_next": {"qk_norm": True, "output_gate": True},
    "gpt_oss": {"bias": "attention", "sinks": True},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "kimi_k2": {},
    "glm4_moe": {},
    "glm_moe_dsa": {},
    "minimax_m2": {"qk_norm": True, "norm_across_heads": True, "float32_router": True},
    "llama4": {},
    "gemma2": {"norms": 4, "tied_embeddings": True},
    "gemma3": {"norms": 4, "qk_norm": True, "tied_embeddings": True},
    "phi3": {},
}
"""What a model type has beside what its config says."""
WRAPPERS = ("mistral3", "kimi_k25")
"""Model types whose ``text_config`` names the family."""
REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
IN_EVERY_LAYER = ("mixtral", "minimax_m2", "gpt_oss")
"""Families whose ``intermediate_size`` is that of an expert."""
NO_ROPE_EVERY = 4
"""Llama 4 attends to all tokens in every fourth layer, elsewhere within chunks."""


def read_config(path: str | Path) -> tuple[dict[str, Any], Path]:
    """What a config.json holds, and where it is. Raises CatalogError for a file that cannot be read or is none."""
    where = Path(path)
    if where.is_dir():
        where = where / "config.json"
    try:
        config = json.loads(where.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogError(f"{where}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CatalogError(f"{where}: not a readable JSON file: {error}") from None
    if not isinstance(config, dict):
        raise CatalogError(f"{where}: expected a JSON object")
    return config, where


def _family(config: dict[str, Any], where: Path) -> tuple[str, dict[str, Any]]:
    """The family and the part of the config that describes text."""
    named = config.get("model_type")
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    if named in WRAPPERS:
        named = inner.get("model_type")
    family = str(named).removesuffix("_text")
    if family not in FAMILIES:
        known = ", ".join((*FAMILIES, *WRAPPERS))
        raise CatalogError(f"{where}: model_type {named!r} is not supported; supported: {known}")
    return family, inner


def _check(family: str, text: dict[str, Any], where: Path) -> None:
    moe = any(text.get(key) for key in EXPERT_KEYS)
    needed = [key for key in REQUIRED if not (key == "intermediate_size" and moe and text.get("moe_intermediate_size"))]
    missing = [key for key in needed if text.get(key) is None]
    if missing:
        raise CatalogError(f"{where}: missing {', '.join(missing)}")
    for key in (*needed, "num_key_value_heads", "head_dim"):
        if text.get(key) is not None:
            check_count(text[key], key, where)
    _check_heads(text, where)
    if (text.get("attention_bias") and family not in ("gpt_oss", "glm4_moe")) or text.get("mlp_bias"):
        raise CatalogError(f"{where}: attention_bias and mlp_bias are not supported for {family}")


def check_count(value: Any, key: str, where: Path) -> int:
    """The value as a count. Raises CatalogError unless it is a whole number above 0."""
    if type(value) is not int or value < 1:
        raise CatalogError(f"{where}: {key} must be a whole number above 0, not {value!r}")
    return value


def _check_heads(config: dict[str, Any], where: Path) -> None:
    """Query heads share KV heads evenly, and the hidden size is a whole number of heads where no head says how wide it is."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise CatalogError(
            f"{where}: num_key_value_heads must divide num_attention_heads, {heads}; {kv_heads} does not"
        )
    if config.get("head_dim") is None and config.get("qk_nope_head_dim") is None and hidden % heads:
        raise CatalogError(f"{where}: num_attention_heads must divide hidden_size, {hidden}; {heads} does not")


def model_from_hf_config(path: str | Path) -> ModelSpec:
    """The model of a ``config.json``, or of a folder that holds one; named after the folder.

    Raises CatalogError for an unreadable file, a missing field, or a family that is not in ``FAMILIES``.
    """
    config, where = read_config(path)
    family, text = _family(config, where)
    _check(family, text, where)
    try:
        return _described(family, config, text, where)
    except KeyError as error:
        raise CatalogError(f"{where}: missing {error.args[0]}") from None
    except (TypeError, AttributeError, ValidationError) as error:
        what = str(error).splitlines()
        raise CatalogError(
            f"{where}: a value is not what {family} configs have: {' '.join(what[1:3] or what)}"
        ) from None


def _described(family: str, config: dict[str, Any], text: dict[str, Any], where: Path) -> ModelSpec:
    """The model of a checked config."""
    heads, traits = text["num_attention_heads"], dict(FAMILIES[family])
    if family == "glm4_moe":
        traits |= {"qk_norm": bool(text.get("use_qk_norm")), "bias": "qkv" if text.get("attention_bias") else "none"}
    latent = _latent(text)
    experts = _experts(family, text, where)
    dense_width = (
        text.get("intermediate_size_mlp") or text.get("intermediate_size") or text.get("moe_intermediate_size")
    )
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    fields: dict[str, Any] = {
        "name": where.resolve().parent.name,
        "layers": text["num_hidden_layers"],
        "hidden_size": text["hidden_size"],
        "intermediate_size": dense_width,
        "q_heads": heads,
        "kv_heads": 1 if latent else text.get("num_key_value_heads") or heads,
        "head_dim": text["qk_nope_head_dim"] if latent else text.get("head_dim") or text["hidden_size"] // heads,
        "vocab_size": text["vocab_size"],
        "max_context_tokens": text["max_position_embeddings"],
        "tied_embeddings": bool(tied),
        "other_parameters": _vision(config.get("vision_config")),
        "experts": experts,
        "latent": latent,
        "window": _window(family, text),
        "linear": _linear(text),
        "source": f"{where}",
    }
    return ModelSpec(**(fields | traits))


def _experts(family: str, text: dict[str, Any], where: Path) -> Experts | None:
    count = next((text[key] for key in EXPERT_KEYS if text.get(key)), None)
    if count is None:
        return None
    active = check_count(text.get("num_experts_per_tok"), "num_experts_per_tok", where)
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    shared = text.get("shared_expert_intermediate_size") or (text.get("n_shared_experts") or 0) * width
    if family == "llama4":
        shared = width
    dense = 0 if family in IN_EVERY_LAYER else _dense_layers(text)
    return Experts(
        count=count, active=active, width=width, shared_width=shared, dense_layers=dense, biases=family == "gpt_oss"
    )


def _dense_layers(text: dict[str, Any]) -> int:
    """Layers without experts: the first ones, those that are listed, or all but every n-th."""
    layers = text["num_hidden_layers"]
    step = text.get("decoder_sparse_step") or text.get("interleave_moe_layer_step") or 1
    dense = (text.get("first_k_dense_replace") or 0) + len(text.get("mlp_only_layers") or ())
    return int(dense + layers - layers // step)


def _latent(text: dict[str, Any]) -> LatentAttention | None:
    if not text.get("kv_lora_rank"):
        return None
    return LatentAttention(
        q_rank=text.get("q_lora_rank") or 0,
        kv_rank=text["kv_lora_rank"],
        rope_dim=text["qk_rope_head_dim"],
        value_dim=text["v_head_dim"],
        index_tokens=text.get("index_topk") or 0,
        index_heads=text.get("index_n_heads") or 0,
        index_dim=text.get("index_head_dim") or 0,
        index_layers=(text.get("indexer_types") or []).count("full") or None,
    )


def _linear(text: dict[str, Any]) -> LinearAttention | None:
    if not text.get("linear_num_value_heads"):
        return None
    layers, every = text["num_hidden_layers"], text.get("full_attention_interval") or 4
    kinds = text.get("layer_types")
    return LinearAttention(
        layers=kinds.count("linear_attention") if kinds else layers - layers // every,
        key_heads=text["linear_num_key_heads"],
        value_heads=text["linear_num_value_heads"],
        key_dim=text["linear_key_head_dim"],
        value_dim=text["linear_value_head_dim"],
        conv=text["linear_conv_kernel_dim"],
        state_bytes=2 if text.get("mamba_ssm_dtype") in ("bfloat16", "float16") else 4,
    )


def _window(family: str, text: dict[str, Any]) -> Window | None:
    """Windows shorter than the context; the chunks of Llama 4 count as windows of their length."""
    tokens = text.get("attention_chunk_size") if family == "llama4" else text.get("sliding_window")
    if not tokens or tokens >= text["max_position_embeddings"] or not text.get("use_sliding_window", True):
        return None
    layers, kinds = text["num_hidden_layers"], text.get("layer_types")
    if kinds:
        windowed = kinds.count("sliding_attention") + kinds.count("chunked_attention")
    elif family in ("gemma3", "llama4"):
        every = NO_ROPE_EVERY if family == "llama4" else text.get("sliding_window_pattern") or 6
        windowed = layers - layers // every
    else:
        windowed = (layers + 1) // 2 if family in ("gemma2", "gpt_oss") else layers
    return Window(layers=windowed, tokens=tokens) if windowed else None


def _vision(vision: Any) -> int:
    """About how many parameters a vision tower has: attention and MLP of its layers, and the way to the text."""
    if not isinstance(vision, dict):
        return 0
    read = {key.removeprefix("vt_"): value for key, value in vision.items()}
    layers = read.get("depth") or read.get("num_hidden_layers") or 0
    hidden, wide = read.get("hidden_size") or 0, read.get("intermediate_size") or 0
    matrices = 3 if read.get("model_type") == "pixtral" else 2
    merged = 4 * hidden if read.get("out_hidden_size") else 0
    mergers = 1 + len(read.get("deepstack_visual_indexes") or ())
    return int(
        layers * (4 * hidden + matrices * wide) * hidden
        + mergers * merged * (merged + (read.get("out_hidden_size") or 0))
    )
