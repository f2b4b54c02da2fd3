"""The models that probed engines run: geometry, and the ``config.json`` of a dtype."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fineserve_calibrate.probes.schema import ProbeError
from fineserve_sim.catalog import CatalogError, model_from_hf_config

Config = Mapping[str, Any]

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_8B = {
    **_LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
}
_TINY = {
    **_LLAMA,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "vocab_size": 1024,
}
QUANTIZATION: Mapping[str, dict[str, Any]] = {
    "bfloat16": {},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "int4_wo": {
        **{"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
        "modules_to_not_convert": ["lm_head"],
    },
}


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """A model by its Hugging Face configuration, without weights."""

    name: str
    config: Config

    def quantized(self, dtype: str) -> dict[str, Any]:
        """Make the configuration of a checkpoint in ``dtype``: bfloat16, fp8 or int4_wo (AWQ)."""
        quantization = QUANTIZATION[dtype]
        return {**self.config, **({"quantization_config": quantization} if quantization else {})}


LLAMA_8B = ProbedModel("llama-3.1-8b", _8B)
TINY = ProbedModel("tiny-llama", _TINY)
ONE_LAYER = ProbedModel("one-layer", {**_TINY, "num_hidden_layers": 1, "max_position_embeddings": 131072})
"""A model so small that a step is the host's work."""


def model_from(path: Path) -> ProbedModel:
    """Read the model of a folder with a ``config.json``, or of such a file. The folder names it.

    Raises ProbeError for an unreadable file, or an architecture that the simulator lacks.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        spec = model_from_hf_config(file)
    except CatalogError as error:
        raise ProbeError(f"--model {error}") from None
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)  # the probes choose the dtype
    return replace(TINY, name=spec.name, config={"torch_dtype": "bfloat16", **config})
