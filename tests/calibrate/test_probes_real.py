"""The probes on this machine's CPU: real kernels, and a real engine where vLLM is installed. Sizes are tiny."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fineserve_calibrate.probes.backend import Unavailable
from fineserve_calibrate.probes.models import ONE_LAYER, TINY
from fineserve_calibrate.probes.operators import PREPARE
from fineserve_calibrate.probes.plan import CPU_QUICK, grid, plan
from fineserve_calibrate.probes.schema import KEYS

torch = pytest.importorskip("torch", reason="torch is not installed")

from fineserve_calibrate.probes.torch_device import TorchDevice, package_version  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # those libraries warn of themselves
VLLM = package_version("vllm") != "none"


@pytest.fixture(scope="module")
def device() -> Iterator[TorchDevice]:
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        probed = TorchDevice(None, {model.name: model for model in (TINY, ONE_LAYER)})
    yield probed
    probed.close()
    torch.set_num_threads(threads)


def seconds(device: TorchDevice, operator: str, **axes: Any) -> dict[tuple[Any, ...], float]:
    """The shortest of some repeats by point, for the axes' combinations: other work on the machine only adds to it."""
    found = {}
    for point in grid(operator, **axes):
        prepared = device.prepare(operator, point)
        prepared.sample(2)
        found[tuple(point.values())] = min(prepared.sample(8))
        prepared.close()
    return found


def test_the_identity_names_processor_and_versions(device: TorchDevice) -> None:
    identity = device.identity
    assert identity.device.endswith("cores")
    assert (identity.gpus, identity.driver, identity.cuda) == (0, "none", "none")
    assert identity.torch == torch.__version__
    assert (identity.vllm != "none") == VLLM
    assert device.healthy()


def test_every_operator_has_a_function() -> None:
    assert set(PREPARE) == set(KEYS)


def test_larger_products_take_longer(device: TorchDevice) -> None:
    found = seconds(device, "gemm", dtype=["bfloat16"], m=[1, 1024], n=[1024], k=[1024])
    assert found[("bfloat16", 1024, 1024, 1024)] > 10 * found[("bfloat16", 1, 1024, 1024)] > 0


HEADS = {"dtype": ["bfloat16"], "kv_dtype": ["bfloat16"], "q_heads": [4], "kv_heads": [2], "head_dim": [64]}


def test_attention_grows_with_what_it_reads(device: TorchDevice) -> None:
    decode = list(seconds(device, "decode_attention", **HEADS, batch=[4], context=[64, 4096]).items())
    short, long = sorted(decode, key=lambda item: item[0][-1])
    assert long[1] > 3 * short[1] > 0
    prefill = seconds(device, "prefill_attention", **HEADS, batch=[1], new_tokens=[16, 512], cached_tokens=[0, 512])
    by_tokens = {(point[-2], point[-1]): value for point, value in prefill.items()}
    assert by_tokens[(512, 512)] > by_tokens[(512, 0)] > by_tokens[(16, 0)]


@pytest.mark.parametrize("operation", [name for name in CPU_QUICK.widths if VLLM or name != "rope"])
def test_small_kernels_run(device: TorchDevice, operation: str) -> None:
    assert seconds(device, "elementwise", operation=[operation], dtype=["bfloat16"], tokens=[4], width=[640])


def test_copies_reach_a_plausible_bandwidth(device: TorchDevice) -> None:
    size = 16 * 2**20
    (taken,) = seconds(device, "copy", direction=["host_to_host"], host_memory=["pageable"], bytes=[size]).values()
    assert 1e8 < size / taken < 1e12


def test_what_a_cpu_lacks_is_said(device: TorchDevice) -> None:
    for operator, reason in {"vmm": "no CUDA driver", "all_reduce": "0 GPUs", "point_to_point": "0 GPUs"}.items():
        (part,) = (part for part in plan(True, True, TINY.name) if part.operator == operator)
        with pytest.raises(Unavailable, match=reason):
            device.prepare(operator, part.points[0])


@pytest.mark.skipif(VLLM, reason="vllm is installed")
def test_engines_need_vllm(device: TorchDevice) -> None:
    (part,) = (part for part in plan(True, True, TINY.name) if part.operator == "host_overhead")
    with pytest.raises(Unavailable, match="vllm is not installed"):
        device.prepare("host_overhead", part.points[0])


@pytest.mark.skipif(not VLLM, reason="vllm is not installed")
def test_vllm_kernels_are_used(device: TorchDevice) -> None:
    points = grid("gemm", dtype=["bfloat16", "int4_wo"], m=[4], n=[256], k=[256])
    names = {device.prepare("gemm", point).implementation for point in points}
    assert names == {"vllm onednn_mm", "vllm cpu_gemm_wna16"}
    attention = grid("decode_attention", **{**HEADS, "kv_dtype": ["fp8"]}, batch=[2], context=[64])
    assert device.prepare("decode_attention", attention[0]).implementation == "vllm cpu attention"


@pytest.mark.skipif(not VLLM, reason="vllm is not installed")
def test_a_real_engine_runs_the_steps_that_are_asked_for(device: TorchDevice) -> None:
    engine: dict[str, Any] = {"model": [TINY.name], "dtype": ["bfloat16"], "kv_dtype": ["bfloat16"], "mode": ["eager"]}
    decode = seconds(device, "step", **engine, decodes=[1, 64], context=[256], prefill_tokens=[0], cached_tokens=[0])
    prefill = seconds(
        device, "step", **engine, decodes=[0, 64], context=[256], prefill_tokens=[16, 1024], cached_tokens=[256]
    )
    by_work = {point[4:]: value for point, value in (decode | prefill).items()}
    assert by_work[(64, 256, 0, 0)] > by_work[(1, 256, 0, 0)] > 1e-4
    assert by_work[(0, 256, 1024, 256)] > by_work[(0, 256, 16, 256)]
    assert by_work[(64, 256, 1024, 256)] > by_work[(64, 256, 0, 0)]
    starts = seconds(
        device, "engine_start", model=[TINY.name], dtype=["bfloat16"], mode=["eager"], phase=["import", "start"]
    )
    assert all(0.5 < value < 300 for value in starts.values())


CUDA_CALLS: dict[str, tuple[str, ...]] = {
    "vllm._custom_ops:cutlass_scaled_mm": ("a", "b", "scale_a", "scale_b", "out_dtype"),
    "vllm._custom_ops:machete_prepack_B": ("b_q_weight", "a_type", "b_type", "group_scales_type"),
    "vllm._custom_ops:machete_mm": ("a", "b_q", "b_type", "b_group_scales", "b_group_zeros", "b_group_size"),
    "vllm._custom_ops:gptq_marlin_repack": ("b_q_weight", "size_k", "size_n", "num_bits"),
    "vllm.model_executor.layers.quantization.utils.marlin_utils:apply_gptq_marlin_linear": (
        *("input", "weight", "weight_scale", "weight_zp", "workspace", "wtype"),
        *("output_size_per_partition", "input_size_per_partition"),
    ),
    "vllm.model_executor.layers.quantization.utils.marlin_utils:marlin_permute_scales": (
        *("s", "size_k", "size_n", "group_size"),
    ),
    "vllm_flash_attn/flash_attn_interface.py:flash_attn_varlen_func": (
        *("q", "k", "v", "out", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "seqused_k", "causal", "block_table"),
        *("fa_version", "q_descale", "k_descale", "v_descale"),
    ),
}
"""What the kernels of a GPU are called with; without a GPU their signatures are all that can be checked."""


def _loaded(module: str) -> ModuleType:
    """A module by its name, or by its file where its package imports on a GPU alone."""
    if not module.endswith(".py"):
        return importlib.import_module(module)
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.origin is not None
    spec = importlib.util.spec_from_file_location("by_file", Path(package.origin).parent / module)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.skipif(not VLLM, reason="vllm is not installed")
@pytest.mark.parametrize("name", CUDA_CALLS, ids=lambda name: name.split(":")[1])
def test_vllm_takes_what_cuda_kernels_are_called_with(name: str) -> None:
    module, function = name.split(":")
    parameters = inspect.signature(getattr(_loaded(module), function)).parameters
    assert set(CUDA_CALLS[name]) <= set(parameters)
    required = {key for key, value in parameters.items() if value.default is inspect.Parameter.empty}
    assert required <= set(CUDA_CALLS[name])


@pytest.mark.skipif(not VLLM, reason="vllm is not installed")
def test_sequences_longer_than_the_model_are_not_tried(device: TorchDevice) -> None:
    keys: dict[str, Any] = {"model": [TINY.name], "dtype": ["bfloat16"], "kv_dtype": ["bfloat16"], "mode": ["eager"]}
    (point,) = grid("step", **keys, decodes=[1], context=[4090], prefill_tokens=[0], cached_tokens=[0])
    with pytest.raises(Unavailable, match="longer than the 4096 tokens of tiny-llama"):
        device.prepare("step", point)
