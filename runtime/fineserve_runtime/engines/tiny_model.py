"""Tiny models made on the spot: a Llama of a few layers, random weights from a seed, a tokenizer of single bytes.

Weights are drawn wide enough that greedy output follows the whole prompt and does not fall into a loop at once; a wrong
KV byte then shows in the tokens. Files are written once per specification and reused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fineserve_runtime.engines.api import TinyModel
from fineserve_runtime.engines.vllm_engine import prepare_environment

if TYPE_CHECKING:
    import torch

BOS, EOS = 0, 1
_SPECIAL = ("<s>", "</s>")


def keeps_fp8_kv() -> bool:
    """Whether vLLM's FP8 KV cache works on this CPU: on x86 it takes AVX-512 or AMX (vLLM's ``cpu_attn.py``)."""
    prepare_environment()
    import torch

    x86 = platform.machine() in ("x86_64", "AMD64")
    return not x86 or torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


def narrow_kv(model: TinyModel) -> tuple[TinyModel, str]:
    """A model with KV blocks half as large as ``model`` has in BF16, and its ``kv_cache_dtype``: the same one in FP8 or,
    where the CPU has no such cache, one of half as many KV heads."""
    if keeps_fp8_kv():
        return model, "fp8_e4m3"
    return replace(model, kv_heads=model.kv_heads // 2), "auto"


def tiny_model(spec: TinyModel, cache_dir: Path) -> Path:
    """The model's folder below ``cache_dir``. Raises ValueError for a vocabulary below 258 (256 bytes and 2 marks)."""
    if spec.vocab < 258:
        raise ValueError(f"tiny model: vocab is {spec.vocab}; 256 bytes and 2 marks need at least 258")
    prepare_environment()  # torch reads its number of threads when it is imported, which may be here
    digest = hashlib.sha256(repr(spec).encode()).hexdigest()[:12]
    folder = cache_dir / f"tiny-{digest}"
    if not folder.exists():
        fresh = folder.with_name(f"{folder.name}.{os.getpid()}")
        fresh.mkdir(parents=True)
        (fresh / "config.json").write_text(json.dumps(_config(spec), indent=1))
        (fresh / "fineserve.json").write_text(json.dumps(asdict(spec)))
        _write_weights(fresh, spec)
        _write_tokenizer(fresh, spec)
        with contextlib.suppress(OSError):  # somebody else was faster, with the same bytes
            fresh.rename(folder)
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _config(spec: TinyModel) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": 2 * spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "bfloat16",
    }


def _write_weights(folder: Path, spec: TinyModel) -> None:
    from safetensors.torch import save_file

    save_file(_weights(spec), folder / "model.safetensors", metadata={"format": "pt"})


def _weights(spec: TinyModel) -> dict[str, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(spec.seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        drawn: torch.Tensor = torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)
        return drawn.to(torch.bfloat16)

    hidden, queries, keys = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": matrix(spec.vocab, hidden, gain=hidden**0.5),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(spec.vocab, hidden, gain=4.0),
    }
    for layer in range(spec.layers):
        at = f"model.layers.{layer}."
        weights |= {
            at + "self_attn.q_proj.weight": matrix(queries, hidden, gain=2.0),
            at + "self_attn.k_proj.weight": matrix(keys, hidden, gain=2.0),
            at + "self_attn.v_proj.weight": matrix(keys, hidden, gain=2.0),
            at + "self_attn.o_proj.weight": matrix(hidden, queries, gain=2.0),
            at + "mlp.gate_proj.weight": matrix(2 * hidden, hidden),
            at + "mlp.up_proj.weight": matrix(2 * hidden, hidden),
            at + "mlp.down_proj.weight": matrix(hidden, 2 * hidden),
            at + "input_layernorm.weight": ones.clone(),
            at + "post_attention_layernorm.weight": ones.clone(),
        }
    return weights


def _write_tokenizer(folder: Path, spec: TinyModel) -> None:
    """One token a byte, in the printable alphabet of byte-level tokenizers; what is left of the vocabulary is filler."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    filler = [f"<unused{i}>" for i in range(spec.vocab - len(letters) - len(_SPECIAL))]
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *letters, *filler])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[1],
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
